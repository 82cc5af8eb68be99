"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from .completion_prepare import prepare_prompts
from .completion_writer import CompletionWriter, PromptEcho, prompt_alternatives
from .echo import EchoOnly, ScoredEcho
from .engine_api import Engine
from .envelope import Envelope, origin_of
from .errors import invalid
from .generation import DeltaSource, Generation, Work
from .json_body import read_body
from .params import check_logprobs
from .prompts import run_sized, split_prompts
from .protocol import CompletionRequest
from .refusals import unsupported
from .responses import encode
from .sse import respond_stream
from .state import STATE, ServerState


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts, whole or as a stream."""
    state = request.app[STATE]
    body = await read_body(request, CompletionRequest)
    engine = state.check_accepting()
    model = state.check_model(body.model)
    with state.track():
        _check(body)
        alternatives = prompt_alternatives(body)
        scored = alternatives is not None
        work = await prepare_prompts(
            state,
            engine,
            body,
            logprobs=body.logprobs,
            prompt_logprobs=alternatives,
            allow_zero=bool(body.echo) or scored,
        )
        echoes = await _echoes(state, engine, body, work)
        origin = origin_of(request, body, "cmpl")
        source: DeltaSource
        if body.max_tokens != 0:
            source = Generation(engine, state.metrics, work, origin)
        elif scored:
            source = ScoredEcho(Generation(engine, state.metrics, work, origin))
        else:
            source = EchoOnly(work)
        envelope = Envelope(id=origin.request_id, model=model)
        writer = CompletionWriter(envelope, source, echoes, body)
        if body.stream:
            return await respond_stream(request, source, writer, template=writer.template)
        answer = await writer.whole_answer()
    return web.Response(body=encode(answer), content_type="application/json")


def _check(body: CompletionRequest) -> None:
    check_logprobs("logprobs", body.logprobs)
    if body.suffix:
        raise unsupported("suffix", "text is continued at its end")
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise invalid(
            "best_of",
            f"best_of must equal n ({n}), as answers are not ranked; got {body.best_of}",
        )


async def _echoes(
    state: ServerState, engine: Engine, body: CompletionRequest, work: list[Work]
) -> list[PromptEcho]:
    """Return what the answers to each prompt repeat of it: its text only if echo is set."""
    if not body.echo:
        return [PromptEcho(token_ids=item.token_ids) for item in work]
    given = split_prompts(body.prompt)
    cut = body.truncate_prompt_tokens is not None

    def echoes() -> list[PromptEcho]:
        decode = engine.tokenizer.decode
        return [
            PromptEcho(
                token_ids=item.token_ids,
                text=prompt if isinstance(prompt, str) and not cut else decode(item.token_ids),
                first_token=decode(item.token_ids[:1], False),
                first_is_text=decode(item.token_ids[:1]) != "",
            )
            for prompt, item in zip(given, work, strict=True)
        ]

    return await run_sized(state.executor, sum(len(item.token_ids) for item in work), echoes)
