"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from .chat_prepare import prepare_chat
from .chat_writer import ChatWriter
from .envelope import Envelope, origin_of
from .generation import Generation
from .json_body import read_body
from .protocol import ChatRequest
from .responses import encode
from .sse import respond_stream
from .state import STATE


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, ChatRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        prepared = await prepare_chat(state, engine, body)
        origin = origin_of(request, body, "chatcmpl")
        generation = Generation(engine, state.metrics, [prepared.work], origin)
        envelope = Envelope(id=origin.request_id, model=model)
        writer = ChatWriter(envelope, generation, prepared, body)
        if body.stream:
            return await respond_stream(request, generation, writer, template=writer.template)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")
