"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET, UnsetType

from .chat_message import MessageBuilder, chat_delta
from .chat_parts import ChoiceParts
from .chat_prepare import PreparedChat, prepare_chat
from .chat_shapes import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    chat_logprobs,
)
from .engine_api import Delta
from .envelope import SYSTEM_FINGERPRINT, Envelope, origin_of
from .errors import ApiError
from .generation import Generation
from .json_body import read_body
from .protocol import ChatRequest
from .responses import Usage, encode
from .sse import event, respond_stream
from .state import STATE
from .stream_usage import StreamUsage


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
        writer = ChatWriter(Envelope(id=origin.request_id, model=model), generation, prepared, body)
        if body.stream:
            return await respond_stream(request, generation, writer)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


class ChatWriter:
    """Writes chats, whole or as chunks; see `sse.StreamFormat`.

    The chunks of a choice: its role, then one for each part, then one with the finish reason and
    nothing else.
    """

    def __init__(
        self, envelope: Envelope, generation: Generation, prepared: PreparedChat, body: ChatRequest
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._top = prepared.top_logprobs
        self._usage = StreamUsage(generation, body.stream_options)
        self._with_token_ids = bool(body.return_token_ids)
        self._choices = [ChoiceParts(prepared.rules) for _ in range(generation.num_choices)]

    def start(self) -> bytes:
        """Return one role chunk for each choice."""
        role = ChatDelta(role="assistant", content="")
        return b"".join(
            self._chunk([ChatChunkChoice(index=index, delta=role)])
            for index in range(self._generation.num_choices)
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return a chunk for each part, and a finish chunk if the choice is over."""
        parts = self._choices[index].take(delta)
        choices = [ChatChunkChoice(index=index, delta=chat_delta(part)) for part in parts]
        logprobs = chat_logprobs(delta.logprobs or None, self._top)
        token_ids = self._token_ids(delta)
        if logprobs is not None or token_ids:
            # What belongs to tokens and not to a part goes with the first part, if there is one.
            if not choices:
                choices.append(ChatChunkChoice(index=index, delta=ChatDelta()))
            choices[0].logprobs = logprobs
            choices[0].token_ids = token_ids
        reason = self._choices[index].finish_reason(delta)
        if reason is not None:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=ChatDelta(),
                    finish_reason=reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return b"".join(self._chunk([choice]) for choice in choices)

    def end(self) -> bytes:
        """Return the usage chunk if it was asked for."""
        return self._chunk([], self._generation.usage()) if self._usage.included else b""

    def error(self, error: ApiError) -> bytes:
        """Return the error object."""
        return event(error.body())

    async def whole_answer(self) -> ChatCompletion:
        """Run the request to its end and return all of it."""
        choices = [_WholeChoice(reader) for reader in self._choices]
        async with self._generation as generation:
            async for index, delta in generation:
                choices[index].add(delta, self._top)
        return ChatCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[
                choice.finish(index, self._with_token_ids) for index, choice in enumerate(choices)
            ],
            usage=self._generation.usage(),
        )

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self._with_token_ids else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=usage or self._usage.of_chunk(),
        )
        return event(encode(chunk))


class _WholeChoice:
    """Gathers the deltas of one choice."""

    def __init__(self, reader: ChoiceParts) -> None:
        self._reader = reader
        self._message = MessageBuilder()
        self._logprobs: ChatLogprobs | None = None
        self._token_ids: list[int] = []
        self._finish_reason = ""
        self._stop_reason: int | str | None = None

    def add(self, delta: Delta, top: int) -> None:
        """Take in one delta."""
        self._message.add(self._reader.take(delta))
        self._token_ids += delta.token_ids
        new = chat_logprobs(delta.logprobs, top)
        if new is not None and self._logprobs is not None:
            self._logprobs.content += new.content
        elif new is not None:
            self._logprobs = new
        self._finish_reason = self._reader.finish_reason(delta) or ""
        self._stop_reason = delta.stop_reason

    def finish(self, index: int, with_token_ids: bool) -> ChatChoice:
        """Return the choice after its last delta."""
        return ChatChoice(
            index=index,
            message=self._message.message(),
            logprobs=self._logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            token_ids=self._token_ids if with_token_ids else UNSET,
        )
