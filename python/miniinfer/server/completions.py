"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web
from msgspec import UnsetType

from miniinfer.sampling_params import SamplingParams

from .completion_logprobs import LogprobWriter
from .completion_shapes import Completion, CompletionChoice, CompletionLogprobs
from .engine_api import Delta, Engine
from .envelope import SYSTEM_FINGERPRINT, Envelope, origin_of
from .errors import ApiError, invalid
from .generation import DeltaSource, EchoOnly, Generation, Work
from .json_body import read_body
from .params import DEFAULT_COMPLETION_TOKENS, check_logprobs, sampling_params, token_limit
from .prompts import run_sized, split_prompts, tokenize_prompts
from .protocol import CompletionRequest
from .refusals import refuse_unsupported
from .responses import Usage, encode
from .sse import event, respond_stream
from .state import STATE, ServerState
from .stream_usage import StreamUsage


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, CompletionRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        _check(body)
        prompts = await tokenize_prompts(body.prompt, engine.tokenizer, state.executor)
        work = _work(engine, body, prompts)
        echoes = await _echoes(state, engine, body, prompts)
        origin = origin_of(request, body, "cmpl")
        source: DeltaSource
        if body.max_tokens == 0:
            source = EchoOnly(work)
        else:
            source = Generation(engine, state.metrics, work, origin)
        envelope = Envelope(id=origin.request_id, model=model)
        writer = CompletionWriter(envelope, source, echoes, body)
        if body.stream:
            return await respond_stream(request, source, writer)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


def _check(body: CompletionRequest) -> None:
    refuse_unsupported(body)
    check_logprobs("logprobs", body.logprobs)
    if body.suffix:
        raise invalid("suffix", "suffix is not supported", "unsupported_parameter")
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise invalid(
            "best_of",
            f"best_of must equal n ({n}), as answers are not ranked; got {body.best_of}",
        )
    if body.echo and body.logprobs is not None:
        raise invalid("logprobs", "logprobs with echo is not supported", "unsupported_parameter")


def _work(engine: Engine, body: CompletionRequest, prompts: list[list[int]]) -> list[Work]:
    """Return the work of each prompt; those with the same limit share their parameters."""
    by_limit: dict[int, SamplingParams] = {}
    work = []
    for token_ids in prompts:
        limit = token_limit(
            len(token_ids),
            engine.max_model_len,
            requested=body.max_tokens,
            default=DEFAULT_COMPLETION_TOKENS,
            allow_zero=bool(body.echo),
        )
        if limit not in by_limit:
            by_limit[limit] = sampling_params(
                body,
                engine.default_sampling_params,
                # An echo alone generates nothing, but its other parameters are checked too.
                max_tokens=limit or 1,
                vocab_size=engine.tokenizer.vocab_size,
                logprobs=body.logprobs,
            )
        work.append(Work(token_ids=token_ids, params=by_limit[limit]))
    return work


async def _echoes(
    state: ServerState, engine: Engine, body: CompletionRequest, prompts: list[list[int]]
) -> list[str]:
    """Return the text that goes before each prompt's answers: nothing unless echo is set."""
    if not body.echo:
        return [""] * len(prompts)
    given = split_prompts(body.prompt)

    def texts() -> list[str]:
        decode = engine.tokenizer.decode
        return [item if isinstance(item, str) else decode(item) for item in given]

    return await run_sized(state.executor, sum(map(len, prompts)), texts)


class CompletionWriter:
    """Writes completions, whole or as chunks; see `sse.StreamFormat`."""

    def __init__(
        self,
        envelope: Envelope,
        source: DeltaSource,
        echoes: list[str],
        body: CompletionRequest,
    ) -> None:
        self._envelope = envelope
        self._source = source
        per_prompt = source.num_choices // len(echoes)
        self._echoes = [echo for echo in echoes for _ in range(per_prompt)]
        self._logprobs = [LogprobWriter(body.logprobs or 0) for _ in self._echoes]
        self._usage = StreamUsage(source, body.stream_options)

    def start(self) -> bytes:
        """Return the echo of each choice that has one."""
        return b"".join(
            self._chunk([CompletionChoice(index=index, text=echo)])
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return a text chunk if there is any, and a finish chunk if the choice is over."""
        events = b""
        if delta.text or delta.logprobs:
            logprobs = self._logprobs[index].write(delta.logprobs)
            choice = CompletionChoice(index=index, text=delta.text, logprobs=logprobs)
            events = self._chunk([choice])
        if delta.finish_reason is not None:
            finish = CompletionChoice(
                index=index,
                text="",
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            events += self._chunk([finish])
        return events

    def end(self) -> bytes:
        """Return the usage chunk if it was asked for."""
        return self._chunk([], self._source.usage()) if self._usage.included else b""

    def error(self, error: ApiError) -> bytes:
        """Return the error object."""
        return event(error.body())

    async def whole_answer(self) -> Completion:
        """Run the request to its end and return all of it."""
        texts = [[echo] for echo in self._echoes]
        logprobs: list[CompletionLogprobs | None] = [None] * self._source.num_choices
        last: dict[int, Delta] = {}
        async with self._source as source:
            async for index, delta in source:
                texts[index].append(delta.text)
                last[index] = delta
                new, seen = self._logprobs[index].write(delta.logprobs), logprobs[index]
                if new is not None and seen is not None:
                    seen.extend(new)
                elif new is not None:
                    logprobs[index] = new
        choices = [
            CompletionChoice(
                index=index,
                text="".join(texts[index]),
                logprobs=logprobs[index],
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            for index, delta in sorted(last.items())
        ]
        return self._completion(choices, self._source.usage())

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return event(encode(self._completion(choices, usage or self._usage.of_chunk())))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=usage,
        )
