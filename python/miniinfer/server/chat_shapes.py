"""The answers of the chat route, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from .engine_api import TokenLogprob
from .responses import PromptLogprobs, Usage, finite


class TopLogprob(msgspec.Struct):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One token of an answer with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of an answer or of one chunk of it."""

    content: list[ChatTokenLogprob]


class FunctionDelta(msgspec.Struct, kw_only=True):
    """The name of a called function, or more of its arguments' JSON text."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a tool call; only the first of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message; absent fields are unchanged."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call of a whole answer."""

    id: str
    type: str = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The message of a whole chat answer; `content` is null if there are calls and no text."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


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
