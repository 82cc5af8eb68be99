"""From a body's fields to `SamplingParams`, and the rules for max_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniinfer.sampling_params import (
    MAX_LOGPROBS,
    RequestOutputKind,
    SamplingParams,
)

from .answer_form import AnswerForm
from .config import MAX_N
from .errors import from_value_error, invalid
from .field_types import MAX_TEMPERATURE
from .prompts import too_long
from .protocol import GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16

_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    vocab_size: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    form: AnswerForm | None = None,
    stream: bool | None = None,
) -> SamplingParams:
    """Return the request's parameters over the model's defaults; raises `ApiError` 400.

    `stream` says whether there is a delta for each step; None leaves it to the body.
    """
    check_n(body.n)
    check_logprobs("prompt_logprobs", prompt_logprobs)
    if body.temperature is not None and not body.temperature <= MAX_TEMPERATURE:
        raise invalid(
            "temperature",
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {body.temperature:g}",
        )
    values = {name: value for name, value in defaults.items() if name in _FIELDS}
    for name in _FIELDS:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    deltas = body.stream if stream is None else stream
    kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=None if form is None else form.params,
            output_kind=kind,
        )
        params.for_vocab(vocab_size)
    except ValueError as error:
        raise from_value_error(error) from error
    return params


def check_n(n: int | None) -> None:
    """Raise a 400 unless n is absent or between 1 and `MAX_N`."""
    if n is not None and not 1 <= n <= MAX_N:
        raise invalid("n", f"n must be between 1 and {MAX_N}, got {n}")


def check_logprobs(param: str, value: int | None) -> None:
    """Raise a 400 unless the number of alternatives is absent or between 0 and 20."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise invalid(param, f"{param} must be between 0 and {MAX_LOGPROBS}, got {value}")


def token_limit(
    prompt_length: int,
    max_model_len: int,
    *,
    requested: int | None,
    param: str = "max_tokens",
    default: int | None = None,
    allow_zero: bool = False,
) -> int:
    """Return how many tokens a request may generate.

    An explicit number must fit into the context beside the prompt. An absent one becomes
    `default`, cut to what is left of the context, or all that is left.
    """
    if requested is not None and requested < (0 if allow_zero else 1):
        least = 0 if allow_zero else 1
        raise invalid(param, f"{param} must be at least {least}, got {requested}")
    left = max_model_len - prompt_length
    if requested is not None and requested > left:
        raise too_long(
            f"{prompt_length + requested} tokens are requested: {prompt_length} in the prompt "
            f"and {requested} for {param}",
            max_model_len,
            param,
        )
    if requested is not None:
        return requested
    if left < 1:
        raise too_long(
            f"the prompt has {prompt_length} tokens, which leaves no room for an answer",
            max_model_len,
            "messages" if default is None else "prompt",
        )
    return left if default is None else min(default, left)


def truncated(
    token_ids: list[int], keep: int | None, max_model_len: int, *, room: int | None
) -> list[int]:
    """Return the last `keep` ids of a prompt, all if None.

    -1 keeps what the context holds beside an answer of `room` tokens, of one if None.
    """
    if keep is None:
        return token_ids
    if keep != -1 and not 1 <= keep <= max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be -1 or between 1 and the context length of "
            f"{max_model_len} tokens (--max-model-len), got {keep}",
        )
    if keep == -1:
        keep = max(1, max_model_len - (1 if room is None else room))
    return token_ids[-keep:]
