"""What the answers of several routes share, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

from typing import Any

import msgspec

MIN_LOGPROB = -9999.0
"""Stands for a probability of zero, which JSON cannot write as a logarithm."""


class PromptTokensDetails(msgspec.Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold (also for minus infinity and NaN)."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def encode(answer: Any) -> bytes:
    """Return an answer as JSON."""
    return msgspec.json.encode(answer)
