"""From the body of a chat to work for the engine; other routes that chat convert to that body."""

from __future__ import annotations

from dataclasses import dataclass

from .chat_parts import PartRules
from .chat_prompt import tokenize_chat
from .engine_api import Engine
from .errors import invalid
from .generation import Work
from .params import check_logprobs, sampling_params, token_limit
from .protocol import ChatRequest
from .refusals import refuse_unsupported_chat
from .state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that has been checked and tokenised."""

    work: Work
    rules: PartRules
    """How to read its answers; see `ChoiceParts`."""
    top_logprobs: int
    """Alternatives to each token that the request asked for."""


async def prepare_chat(state: ServerState, engine: Engine, body: ChatRequest) -> PreparedChat:
    """Check a chat and turn it into ids and parameters; raises `ApiError` 400."""
    refuse_unsupported_chat(body)
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
    params = sampling_params(
        body,
        engine.default_sampling_params,
        max_tokens=limit,
        vocab_size=engine.tokenizer.vocab_size,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return PreparedChat(
        work=Work(token_ids=token_ids, params=params),
        rules=PartRules(include_reasoning=body.include_reasoning is not False),
        top_logprobs=body.top_logprobs or 0,
    )
