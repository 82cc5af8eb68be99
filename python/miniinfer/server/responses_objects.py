"""What /v1/responses answers with, as structs in the order of OpenAI's own fields."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from .chat_shapes import ChatTokenLogprob
from .responses import Usage
from .responses_protocol import FunctionTool, Reasoning, TextConfig


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    """The text of a reasoning item."""

    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """What the model says."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thinks before it speaks; the model's own words, not a summary."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A function that the model wants called; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """How much of the input came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """How much of the output was reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


class ResponseFailure(msgspec.Struct):
    """Why a response has failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response that has been forgotten."""

    id: str
    object: str = "response"
    deleted: bool = True


def response_usage(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    """Return the counts under this API's names."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
