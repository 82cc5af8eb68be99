"""The answers of the OpenAI routes, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class TopLogprob(msgspec.Struct):
    """An alternative to a token, as chat answers report it."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One token of a chat answer with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of a chat answer or of one chunk of it."""

    content: list[ChatTokenLogprob]


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message; absent fields are unchanged."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The message of a whole chat answer."""

    role: str = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; offsets are in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]

    def extended(self, more: CompletionLogprobs | None) -> CompletionLogprobs:
        """Return these lists with another's behind them."""
        if more is None:
            return self
        return CompletionLogprobs(
            self.text_offset + more.text_offset,
            self.token_logprobs + more.token_logprobs,
            self.tokens + more.tokens,
            self.top_logprobs + more.top_logprobs,
        )


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, whole or as a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, whole or as a chunk."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def chat_logprobs(entries: Sequence[TokenLogprob] | None, top: int) -> ChatLogprobs | None:
    """Return the entries in the chat format with at most `top` alternatives each."""
    if entries is None:
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                entry.text,
                finite(entry.logprob),
                list(entry.bytes),
                [
                    TopLogprob(text, finite(logprob), list(raw))
                    for _, text, raw, logprob in entry.top[:top]
                ],
            )
            for entry in entries
        ]
    )


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold (also for minus infinity and NaN)."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def encode(answer: Any) -> bytes:
    """Return an answer as JSON."""
    return msgspec.json.encode(answer)
