"""From the body of a completion to work for the engine."""

from __future__ import annotations

from miniinfer.sampling_params import SamplingParams

from .answer_form import answer_form
from .engine_api import Engine
from .generation import Work
from .params import DEFAULT_COMPLETION_TOKENS, sampling_params, token_limit, truncated
from .prompts import tokenize_prompts
from .protocol import CompletionRequest, GenerateRequest
from .refusals import refuse_unsupported
from .state import ServerState


async def prepare_prompts(
    state: ServerState,
    engine: Engine,
    body: CompletionRequest | GenerateRequest,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    allow_zero: bool = False,
) -> list[Work]:
    """Check a body and turn its prompts into ids and parameters; raises `ApiError` 400.

    Prompts with the same limit share their parameters. With `allow_zero` a body may ask for no
    token at all, and gets parameters for one.
    """
    refuse_unsupported(body)
    form = answer_form(body)
    may_cut = body.truncate_prompt_tokens is not None
    prompts = await tokenize_prompts(
        body.prompt,
        engine.tokenizer,
        state.executor,
        max_tokens=None if may_cut else engine.max_model_len,
    )
    room = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    form_param = "structured_outputs" if form is None else form.param
    by_limit: dict[int, SamplingParams] = {}
    work = []
    for whole in prompts:
        token_ids = truncated(whole, body.truncate_prompt_tokens, engine.max_model_len, room=room)
        limit = token_limit(
            len(token_ids),
            engine.max_model_len,
            requested=body.max_tokens,
            default=DEFAULT_COMPLETION_TOKENS,
            allow_zero=allow_zero,
        )
        if limit not in by_limit:
            by_limit[limit] = sampling_params(
                body,
                engine.default_sampling_params,
                max_tokens=limit or 1,
                vocab_size=engine.tokenizer.vocab_size,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                form=form,
                stream=None if limit else False,
            )
        work.append(Work(token_ids=token_ids, params=by_limit[limit], form_param=form_param))
    if form is not None:
        compiled = await form.compiled(engine, state.executor)
        for params in by_limit.values():
            params.structured_outputs = compiled
    return work
