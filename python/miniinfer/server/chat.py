"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET, UnsetType

from .chat_prompt import tokenize_chat
from .engine_api import Delta, Engine
from .envelope import SYSTEM_FINGERPRINT, Envelope, origin_of
from .errors import ApiError, invalid
from .generation import Generation, Work
from .json_body import read_body
from .params import check_logprobs, sampling_params, token_limit
from .protocol import ChatRequest, StreamOptions, refuse_tools, refuse_unsupported
from .responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
    chat_logprobs,
    encode,
)
from .sse import event, respond_stream
from .state import STATE, ServerState


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, ChatRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        work = await _prepare(state, engine, body)
        origin = origin_of(request, body, "chatcmpl")
        generation = Generation(engine, state.metrics, [work], origin)
        envelope = Envelope(id=origin.request_id, model=model)
        top = body.top_logprobs or 0
        if body.stream:
            chat_format = ChatStreamFormat(envelope, generation, top, body.stream_options)
            return await respond_stream(request, generation, chat_format)
        answer = await _whole_answer(generation, envelope, top)
    return web.Response(body=encode(answer), content_type="application/json")


async def _prepare(state: ServerState, engine: Engine, body: ChatRequest) -> Work:
    refuse_unsupported(body)
    refuse_tools(body)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    token_ids = await tokenize_chat(
        body.messages,
        body,
        config=state.config,
        tokenizer=engine.tokenizer,
        executor=state.executor,
        extra_kwargs=effort,
    )
    param, requested = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        param, requested = "max_completion_tokens", body.max_completion_tokens
    limit = token_limit(len(token_ids), engine.max_model_len, requested=requested, param=param)
    return Work(
        token_ids=token_ids,
        params=sampling_params(
            body,
            engine.default_sampling_params,
            max_tokens=limit,
            vocab_size=engine.tokenizer.vocab_size,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
    )


class ChatStreamFormat:
    """Chat chunks: role, content, finish, then usage if asked; see `sse.StreamFormat`."""

    def __init__(
        self, envelope: Envelope, generation: Generation, top: int, options: StreamOptions | None
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._top = top
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = self._include_usage and bool(
            options and options.continuous_usage_stats
        )

    def start(self) -> bytes:
        """Return one role chunk for each choice."""
        role = ChatDelta(role="assistant", content="")
        indices = range(self._generation.num_choices)
        return b"".join(self._chunk([ChatChunkChoice(index=i, delta=role)]) for i in indices)

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return a content chunk if there is any, and a finish chunk if the choice is over."""
        events = b""
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._top)
            content = ChatDelta(content=delta.text)
            events = self._chunk([ChatChunkChoice(index=index, delta=content, logprobs=logprobs)])
        if delta.finish_reason is not None:
            events += self._chunk(
                [
                    ChatChunkChoice(
                        index=index,
                        delta=ChatDelta(),
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                    )
                ]
            )
        return events

    def end(self) -> bytes:
        """Return the usage chunk if it was asked for."""
        return self._chunk([], self._generation.usage()) if self._include_usage else b""

    def error(self, error: ApiError) -> bytes:
        """Return the error object."""
        return event(error.body())

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        shown: Usage | UnsetType | None = usage if self._include_usage else UNSET
        if self._usage_always:
            shown = self._generation.usage()
        chunk = ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=shown,
        )
        return event(encode(chunk))


async def _whole_answer(generation: Generation, envelope: Envelope, top: int) -> ChatCompletion:
    texts: list[list[str]] = [[] for _ in range(generation.num_choices)]
    logprobs: list[ChatLogprobs | None] = [None] * generation.num_choices
    last: dict[int, Delta] = {}
    async with generation:
        async for index, delta in generation:
            texts[index].append(delta.text)
            last[index] = delta
            new = chat_logprobs(delta.logprobs, top)
            seen = logprobs[index]
            if new is not None and seen is not None:
                seen.content += new.content
            elif new is not None:
                logprobs[index] = new
    choices = [
        ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(texts[index])),
            logprobs=logprobs[index],
            finish_reason=str(delta.finish_reason),
            stop_reason=delta.stop_reason,
        )
        for index, delta in sorted(last.items())
    ]
    return ChatCompletion(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=SYSTEM_FINGERPRINT,
        choices=choices,
        usage=generation.usage(),
    )
