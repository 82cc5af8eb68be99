"""The items of a response, each written as its events and as the whole that they add up to."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod

from .blocks import Block
from .chat_message import new_call_id
from .chat_shapes import ChatTokenLogprob
from .responses_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    Event,
    OutputItemAdded,
    OutputItemDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from .responses_logprobs import TextLogprobs
from .responses_objects import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


class ItemWriter(ABC):
    """Writes one block of an answer as an item.

    Each event holds its own copy of the item: events are encoded after later ones are made.
    """

    def __init__(self, block: Block, prefix: str, logprobs: TextLogprobs | None) -> None:
        self._block = block
        self._id = f"{prefix}_{uuid.uuid4().hex}"
        self._index = block.index
        self._logprobs = logprobs

    def begin(self) -> list[Event]:
        """Return the events of an item that has nothing yet."""
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress"))]

    @abstractmethod
    def append(self, text: str) -> Event:
        """Return the event of more text."""

    @abstractmethod
    def end(self, status: str) -> tuple[list[Event], OutputItem]:
        """Return the last events and the whole item."""

    @abstractmethod
    def _item(self, status: str) -> OutputItem:
        """Return the item without anything in it."""

    def _part_added(self, part: OutputText | ReasoningText) -> Event:
        return ContentPartAdded(item_id=self._id, output_index=self._index, part=part)

    def _part_done(self, part: OutputText | ReasoningText) -> Event:
        return ContentPartDone(item_id=self._id, output_index=self._index, part=part)

    def _item_done(self, item: OutputItem) -> Event:
        return OutputItemDone(output_index=self._index, item=item)

    def _skip(self, text: str) -> None:
        if self._logprobs is not None:
            self._logprobs.skip(text)


class MessageWriter(ItemWriter):
    """Text."""

    def __init__(self, block: Block, logprobs: TextLogprobs | None) -> None:
        super().__init__(block, "msg", logprobs)
        self._all_logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[Event]:
        """Return the beginnings of the item and of its only part."""
        return [*super().begin(), self._part_added(OutputText(text=""))]

    def append(self, text: str) -> Event:
        """Return the event of more text, with the tokens that it came from."""
        new = [] if self._logprobs is None else self._logprobs.take(text)
        self._all_logprobs += new
        return TextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=new)

    def end(self, status: str) -> tuple[list[Event], OutputItem]:
        """Return the ends of the text, of its part and of the item."""
        text = self._block.text
        part = OutputText(text=text, logprobs=self._all_logprobs)
        item = self._item(status)
        item.content.append(part)
        return [
            TextDone(
                item_id=self._id,
                output_index=self._index,
                text=text,
                logprobs=self._all_logprobs,
            ),
            self._part_done(part),
            self._item_done(item),
        ], item

    def _item(self, status: str) -> MessageItem:
        return MessageItem(id=self._id, status=status, content=[])


class ReasoningWriter(ItemWriter):
    """Reasoning, in the model's own words."""

    def __init__(self, block: Block, logprobs: TextLogprobs | None) -> None:
        super().__init__(block, "rs", logprobs)

    def begin(self) -> list[Event]:
        """Return the beginnings of the item and of its only part."""
        return [*super().begin(), self._part_added(ReasoningText(text=""))]

    def append(self, text: str) -> Event:
        """Return the event of more reasoning."""
        self._skip(text)
        return ReasoningDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: str) -> tuple[list[Event], OutputItem]:
        """Return the ends of the text, of its part and of the item."""
        part = ReasoningText(text=self._block.text)
        item = self._item(status)
        item.content.append(part)
        return [
            ReasoningDone(item_id=self._id, output_index=self._index, text=part.text),
            self._part_done(part),
            self._item_done(item),
        ], item

    def _item(self, status: str) -> ReasoningItem:
        return ReasoningItem(id=self._id, status=status, content=[])


class CallWriter(ItemWriter):
    """A function call."""

    def __init__(self, block: Block, logprobs: TextLogprobs | None) -> None:
        super().__init__(block, "fc", logprobs)
        self._call_id = new_call_id()

    def append(self, text: str) -> Event:
        """Return the event of more arguments."""
        self._skip(text)
        return ArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: str) -> tuple[list[Event], OutputItem]:
        """Return the ends of the arguments and of the item."""
        item = self._item(status)
        item.arguments = self._block.text
        return [
            ArgumentsDone(
                item_id=self._id,
                output_index=self._index,
                name=item.name,
                arguments=item.arguments,
            ),
            self._item_done(item),
        ], item

    def _item(self, status: str) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id, status=status, call_id=self._call_id, name=self._block.name, arguments=""
        )


def item_writer(block: Block, logprobs: TextLogprobs | None) -> ItemWriter:
    """Return the writer of a block's kind."""
    if block.kind == "reasoning":
        return ReasoningWriter(block, logprobs)
    if block.kind == "tool_call":
        return CallWriter(block, logprobs)
    return MessageWriter(block, logprobs)
