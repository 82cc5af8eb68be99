"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from aiohttp import web

from .chat_parts import ChoiceParts
from .chat_prepare import PreparedChat, chat_token_ids, prepare_chat
from .engine_api import Engine
from .envelope import origin_of
from .errors import ApiError, renamed
from .generation import Generation
from .json_body import read_body
from .messages_chat import NAMES, chat_request, prompt_request
from .messages_objects import Ping, TokenCount, write
from .messages_protocol import CountTokensRequest, MessagesRequest, check_body
from .messages_stream import MessageWriter
from .protocol import ChatRequest
from .responses import encode
from .sse import Framing, respond_stream
from .state import STATE, ServerState

_FRAMING = Framing(done=b"", keep_alive=write(Ping()))


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, MessagesRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        check_body(body)
        chat = chat_request(body)
        prepared = await _prepare(state, engine, chat)
        cut_reason = _limit(prepared, body.max_tokens)
        origin = origin_of(request, chat, "msg", separator="_")
        generation = Generation(engine, state.metrics, [prepared.work], origin)
        parts = ChoiceParts(prepared.rules)
        writer = MessageWriter(origin.request_id, model, generation, parts, cut_reason)
        if body.stream:
            return await respond_stream(request, generation, writer, _FRAMING)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


async def count_tokens(request: web.Request) -> web.Response:
    """Return how many tokens a conversation has; it may be longer than the context."""
    state = request.app[STATE]
    body = await read_body(request, CountTokensRequest)
    engine = state.engine()
    state.check_model(body.model)
    chat = prompt_request(body)
    try:
        token_ids = await chat_token_ids(state, engine, chat)
    except ApiError as error:
        raise renamed(error, NAMES) from error
    answer = TokenCount(len(token_ids))
    return web.Response(body=encode(answer), content_type="application/json")


async def _prepare(state: ServerState, engine: Engine, chat: ChatRequest) -> PreparedChat:
    try:
        return await prepare_chat(state, engine, chat)
    except ApiError as error:
        raise renamed(error, NAMES) from error


def _limit(prepared: PreparedChat, max_tokens: int) -> str:
    """Limit an answer that may so far fill the context; returns why it is cut if it is.

    `max_tokens` may be more than the context holds: clients of this API always send one.
    """
    params = prepared.work.params
    left = params.max_tokens
    if left is not None and max_tokens > left:
        return "model_context_window_exceeded"
    params.max_tokens = max_tokens
    return "max_tokens"
