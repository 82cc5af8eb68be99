"""POST /generate: the plain route, with events of `{request_id, text, finished}`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from .completion_prepare import prepare_prompts
from .engine_api import Delta
from .envelope import origin_of
from .errors import ApiError, invalid
from .generation import Generation
from .json_body import read_body
from .protocol import GenerateRequest
from .refusals import unsupported
from .responses import encode
from .sse import event, respond_stream
from .state import STATE
from .utility_shapes import GenerateAnswer, GenerateEvent


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue one prompt with one answer, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, GenerateRequest)
    engine = state.check_accepting()
    state.check_model(body.model)
    with state.track():
        if body.n not in (None, 1):
            raise invalid("n", f"n must be 1 on this route, got {body.n}")
        if body.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "/v1/completions has it")
        work = await prepare_prompts(state, engine, body)
        if len(work) != 1:
            raise invalid("prompt", f"this route takes one prompt, got {len(work)}")
        origin = origin_of(request, body, "gen")
        generation = Generation(engine, state.metrics, work, origin)
        writer = GenerateWriter(origin.request_id, generation, body)
        if body.stream:
            return await respond_stream(request, generation, writer)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


class GenerateWriter:
    """Writes the answer whole or as events; see `sse.StreamFormat`."""

    def __init__(self, request_id: str, generation: Generation, body: GenerateRequest) -> None:
        self._request_id = request_id
        self._generation = generation
        self._stop_token_ids = frozenset(body.stop_token_ids or ())
        self._with_token_ids = bool(body.return_token_ids)

    def start(self) -> bytes:
        """Return nothing: this stream has no preamble."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return a text event if there is any, and the last event if the request is over."""
        events = b""
        if self._with_token_ids and delta.token_ids:
            token_ids = list(delta.token_ids)
            events = self._event(text=delta.text, token_ids=token_ids, finished=False)
        elif delta.text:
            events = self._event(text=delta.text, finished=False)
        if delta.finish_reason is not None:
            events += self._event(text="", finished=True, stop_reason=self._stop_reason(delta))
        return events

    def end(self) -> bytes:
        """Return nothing: the last event came with the finish."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the last event of a request that failed, with the error's object."""
        reason = "cancelled" if error.code in ("aborted", "shutting_down") else "error"
        return self._event(text="", finished=True, stop_reason=reason, error=error.fields())

    async def whole_answer(self) -> GenerateAnswer:
        """Run the request to its end and return all of it."""
        texts: list[str] = []
        token_ids: list[int] = []
        stop_reason = ""
        async with self._generation as generation:
            async for _, delta in generation:
                texts.append(delta.text)
                token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    stop_reason = self._stop_reason(delta)
        return GenerateAnswer(
            request_id=self._request_id,
            text="".join(texts),
            token_ids=token_ids,
            stop_reason=stop_reason,
            usage=self._generation.usage(),
        )

    def _event(self, **fields: Any) -> bytes:
        return event(encode(GenerateEvent(request_id=self._request_id, **fields)))

    def _stop_reason(self, delta: Delta) -> str:
        if delta.finish_reason == "length":
            return "max_tokens"
        asked = isinstance(delta.stop_reason, str) or delta.stop_reason in self._stop_token_ids
        return "stop" if asked else "eos"
