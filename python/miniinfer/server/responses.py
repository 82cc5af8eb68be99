"""What the answers of several routes share, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from .engine_api import TokenLogprob

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


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token at a place of the prompt; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, itself and the likeliest, by token id; null for the first."""


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, top: int
) -> PromptLogprobs | UnsetType:
    """Return a prompt's entries with at most `top` alternatives each, in vLLM's format."""
    if entries is None:
        return UNSET
    return [None if entry is None else _prompt_logprob(entry, top) for entry in entries]


def _prompt_logprob(entry: TokenLogprob, top: int) -> dict[str, PromptLogprob]:
    table = {
        str(token_id): PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text)
        for rank, (token_id, text, _, logprob) in enumerate(entry.top[:top], 1)
    }
    table.setdefault(
        str(entry.token_id),
        PromptLogprob(logprob=finite(entry.logprob), rank=entry.rank, decoded_token=entry.text),
    )
    return table


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold (also for minus infinity and NaN)."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def encode(answer: Any) -> bytes:
    """Return an answer as JSON."""
    return msgspec.json.encode(answer)
