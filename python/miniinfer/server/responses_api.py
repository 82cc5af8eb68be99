"""POST /v1/responses, and what was stored of it: GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from .chat_parts import ChoiceParts
from .chat_prepare import PreparedChat
from .envelope import API_KEY, origin_of, tenant_of
from .errors import ApiError, invalid
from .generation import Generation
from .json_body import read_body
from .responses import encode
from .responses_chat import chat_request, prepare_response
from .responses_input import input_items, messages_of, output_items
from .responses_logprobs import TextLogprobs
from .responses_objects import DeletedResponse, ResponseObject
from .responses_protocol import (
    InputItem,
    Reasoning,
    ResponsesRequest,
    TextConfig,
    TextFormat,
    check_body,
)
from .responses_store import RESPONSES, StoredResponse
from .responses_stream import ResponseWriter
from .sse import Framing, respond_stream
from .state import STATE

_FRAMING = Framing(done=b"")


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer the items of a conversation, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, ResponsesRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        check_body(body)
        items = _earlier_items(request, body) + input_items(body)
        messages = messages_of(items, body.instructions)
        prepared = await prepare_response(state, engine, body, messages)
        origin = origin_of(request, chat_request(body, messages), "resp", separator="_")
        generation = Generation(engine, state.metrics, [prepared.work], origin)
        writer = ResponseWriter(
            _new_response(body, prepared, origin.request_id, model),
            generation,
            ChoiceParts(prepared.rules),
            None if prepared.work.params.logprobs is None else TextLogprobs(prepared.top_logprobs),
            _keeper(request, items) if body.store is not False else _forget,
        )
        if body.stream:
            return await respond_stream(request, generation, writer, _FRAMING)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response."""
    if request.query.get("stream", "false") != "false":
        raise invalid("stream", "stored responses are not streamed", "unsupported_parameter")
    response_id = request.match_info["id"]
    stored = request.app[RESPONSES].get(_holder(request), response_id)
    if stored is None:
        raise _not_found(response_id)
    return web.Response(body=stored.body, content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response."""
    response_id = request.match_info["id"]
    if not request.app[RESPONSES].delete(_holder(request), response_id):
        raise _not_found(response_id)
    answer = DeletedResponse(id=response_id)
    return web.Response(body=encode(answer), content_type="application/json")


def _earlier_items(request: web.Request, body: ResponsesRequest) -> list[InputItem]:
    if body.previous_response_id is None:
        return []
    stored = request.app[RESPONSES].get(_holder(request), body.previous_response_id)
    if stored is None:
        raise invalid(
            "previous_response_id",
            f"there is no stored response {body.previous_response_id!r}",
            "previous_response_not_found",
        )
    return stored.items()


def _keeper(request: web.Request, items: list[InputItem]) -> Callable[[ResponseObject], None]:
    """Return what stores the response to these items once it has ended."""

    def keep(response: ResponseObject) -> None:
        conversation = msgspec.json.encode([*items, *output_items(response.output)])
        stored = StoredResponse(body=encode(response), conversation=conversation)
        request.app[RESPONSES].put(_holder(request), response.id, stored)

    return keep


def _forget(response: ResponseObject) -> None:
    """Store nothing."""


def _holder(request: web.Request) -> str:
    return tenant_of(request.get(API_KEY), None)


def _not_found(response_id: str) -> ApiError:
    message = f"there is no stored response {response_id!r}"
    return ApiError(404, message, param="response_id", code="response_not_found")


def _new_response(
    body: ResponsesRequest, prepared: PreparedChat, response_id: str, model: str
) -> ResponseObject:
    """Return the response before its first item; it repeats what was asked."""
    text = body.text or TextConfig()
    params = prepared.work.params
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or Reasoning(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=params.temperature,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=prepared.top_logprobs,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )
