"""The answers of the completions route, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from .responses import PromptLogprobs, Usage


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; offsets are in characters of the choice's text.

    The first token of an echoed prompt has null for its logprob and its alternatives.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, more: CompletionLogprobs) -> None:
        """Append another's lists."""
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs += more.top_logprobs


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, whole or as a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET

    def add(self, more: CompletionChoice) -> None:
        """Take in what a chunk adds to this choice."""
        self.text += more.text
        if self.logprobs is None:
            self.logprobs = more.logprobs
        elif more.logprobs is not None:
            self.logprobs.extend(more.logprobs)
        self.finish_reason = more.finish_reason
        self.stop_reason = more.stop_reason
        if more.token_ids is not UNSET:
            self.token_ids = (self.token_ids or []) + more.token_ids
        self.prompt_token_ids = self.prompt_token_ids or more.prompt_token_ids
        self.prompt_logprobs = self.prompt_logprobs or more.prompt_logprobs


class Completion(msgspec.Struct, kw_only=True):
    """A completion, whole or as a chunk."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
