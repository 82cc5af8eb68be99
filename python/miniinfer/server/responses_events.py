"""The events of a /v1/responses stream, under OpenAI's names."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .chat_shapes import ChatTokenLogprob
from .responses import encode
from .responses_objects import OutputItem, OutputText, ReasoningText, ResponseObject
from .sse import named_event


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """One event; they are numbered from 0 within a stream."""

    sequence_number: int = -1


class _ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class ResponseCreated(_ResponseEvent, tag="response.created"):
    """The request is taken."""


class ResponseInProgress(_ResponseEvent, tag="response.in_progress"):
    """The model is at work."""


class ResponseCompleted(_ResponseEvent, tag="response.completed"):
    """The answer is over and whole."""


class ResponseIncomplete(_ResponseEvent, tag="response.incomplete"):
    """The answer is over and cut."""


class ResponseFailed(_ResponseEvent, tag="response.failed"):
    """The answer has ended with an error."""


class ErrorEvent(Event, tag="error", kw_only=True):
    """An error before there was a response."""

    code: str | None
    message: str
    param: str | None


class _ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    """An item is over."""


class _InItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _InContent(_InItem, kw_only=True):
    content_index: int = 0


class _PartEvent(_InContent, kw_only=True):
    part: OutputText | ReasoningText


class ContentPartAdded(_PartEvent, tag="response.content_part.added"):
    """A part of an item begins."""


class ContentPartDone(_PartEvent, tag="response.content_part.done"):
    """A part of an item is over."""


class TextDelta(_InContent, tag="response.output_text.delta", kw_only=True):
    """More text of a message."""

    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_InContent, tag="response.output_text.done", kw_only=True):
    """All text of a message."""

    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_InContent, tag="response.reasoning_text.delta", kw_only=True):
    """More reasoning."""

    delta: str


class ReasoningDone(_InContent, tag="response.reasoning_text.done", kw_only=True):
    """All text of a reasoning item."""

    text: str


class ArgumentsDelta(_InItem, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done", kw_only=True):
    """All of a call's arguments."""

    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)


def write(event: Event) -> bytes:
    """Return an event as a stream holds it."""
    return named_event(str(event.__struct_config__.tag), encode(event))
