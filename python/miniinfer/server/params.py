"""From a body's fields to `SamplingParams`, and the rules for max_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniinfer.sampling_params import RequestOutputKind, SamplingParams

from .config import MAX_N
from .errors import ApiError, from_value_error, invalid
from .protocol import GenerationRequest

MAX_TEMPERATURE = 2.0
MAX_TOP_LOGPROBS = 20
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
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    vocab_size: int,
    logprobs: int | None = None,
) -> SamplingParams:
    """Return the request's parameters over the model's defaults; raises `ApiError` 400."""
    check_n(body.n)
    if body.temperature is not None and not body.temperature <= MAX_TEMPERATURE:
        raise invalid(
            "temperature",
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {body.temperature:g}",
        )
    values = {name: value for name, value in defaults.items() if name in _FIELDS}
    for name in _FIELDS:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind
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
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        raise invalid(param, f"{param} must be between 0 and {MAX_TOP_LOGPROBS}, got {value}")


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
        raise _too_long(
            f"{prompt_length + requested} tokens are requested: {prompt_length} in the prompt "
            f"and {requested} for {param}",
            max_model_len,
            param,
        )
    if requested is not None:
        return requested
    if left < 1:
        raise _too_long(
            f"the prompt has {prompt_length} tokens, which leaves no room for an answer",
            max_model_len,
            "messages" if default is None else "prompt",
        )
    return left if default is None else min(default, left)


def _too_long(what: str, max_model_len: int, param: str) -> ApiError:
    message = f"this model's maximum context length is {max_model_len} tokens, but {what}"
    return invalid(param, message, "context_length_exceeded")
