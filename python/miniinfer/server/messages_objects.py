"""What /v1/messages answers with, whole and as events, under Anthropic's names."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from .responses import Usage, encode
from .sse import named_event

SIGNATURE = "miniinfer"
"""Stands for the signature of a thinking block.

Clients send blocks back only with one. It proves nothing, and none is asked for.
"""


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """What the model says."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """What the model thinks before it speaks."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A tool that the model wants used."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """How much of the output was thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of one message; `input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """An answer, whole or as far as it has come."""

    id: str
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block."""

    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More JSON text of a tool's input."""

    partial_json: str


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The message begins."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, with nothing in it."""

    index: int
    content_block: AnswerBlock


class BlockChange(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A block gains something."""

    index: int
    delta: BlockDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is over."""

    index: int


class StopFields(msgspec.Struct):
    """Why a message is over."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageChange(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The message's last blocks are over."""

    delta: StopFields
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The message is over."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing; the stream is alive."""


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockChange | BlockStop | MessageChange | MessageStop
)


def write(event: MessageEvent | Ping) -> bytes:
    """Return an event as a stream holds it."""
    return named_event(str(event.__struct_config__.tag), encode(event))


def message_usage(usage: Usage, thinking_tokens: int) -> MessageUsage:
    """Return the counts under this API's names."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens),
    )
