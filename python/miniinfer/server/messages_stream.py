"""A message as it comes into being: deltas in, events out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from .blocks import Block, BlockEvent, BlockReader, reasoning_tokens
from .chat_parts import ChoiceParts
from .engine_api import Delta
from .errors import ApiError
from .generation import Generation
from .messages_arguments import tool_input
from .messages_errors import error_body
from .messages_objects import (
    SIGNATURE,
    AnswerBlock,
    BlockChange,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    Message,
    MessageChange,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    StopFields,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    message_usage,
    write,
)
from .sse import named_event


class MessageWriter:
    """Writes a message, whole or as events; see `sse.StreamFormat`.

    `cut_reason` is the stop reason of an answer that its length has ended.
    """

    def __init__(
        self,
        message_id: str,
        model: str,
        generation: Generation,
        parts: ChoiceParts,
        cut_reason: str,
    ) -> None:
        self._id = message_id
        self._model = model
        self._generation = generation
        self._parts = parts
        self._cut_reason = cut_reason
        self._blocks = BlockReader()
        self._tool_use_id = ""
        self._content: list[AnswerBlock] = []
        self._stop = StopFields(None, None)

    def start(self) -> bytes:
        """Return the event of a message that has nothing yet."""
        return write(MessageStart(self._message(StopFields(None, None))))

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return what a delta adds to the blocks."""
        return b"".join(map(write, self._take(delta)))

    def end(self) -> bytes:
        """Return the ends of the last block and of the message."""
        events = [*self._finish(), MessageChange(self._stop, self._usage()), MessageStop()]
        return b"".join(map(write, events))

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return named_event("error", error_body(error))

    async def whole_answer(self) -> Message:
        """Run the request to its end and return all of it."""
        async with self._generation as generation:
            async for _, delta in generation:
                self._take(delta)
        self._finish()
        return self._message(self._stop)

    def _message(self, stop: StopFields) -> Message:
        return Message(
            id=self._id,
            model=self._model,
            content=self._content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage()
        return message_usage(usage, reasoning_tokens(self._blocks.blocks, usage.completion_tokens))

    def _take(self, delta: Delta) -> list[MessageEvent]:
        events = self._events(self._blocks.read(self._parts.take(delta)))
        if delta.finish_reason is not None:
            self._stop = self._stop_fields(delta)
        return events

    def _stop_fields(self, delta: Delta) -> StopFields:
        if delta.finish_reason == "length":
            return StopFields(self._cut_reason, None)
        if isinstance(delta.stop_reason, str):
            return StopFields("stop_sequence", delta.stop_reason)
        return StopFields("tool_use" if self._parts.num_calls else "end_turn", None)

    def _finish(self) -> list[MessageEvent]:
        return self._events(self._blocks.finish())

    def _events(self, block_events: Iterable[BlockEvent]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for event in block_events:
            block = event[1]
            if event[0] == "open":
                if block.kind == "tool_call":
                    self._tool_use_id = f"toolu_{uuid.uuid4().hex}"
                events.append(BlockStart(block.index, self._block(block, empty=True)))
            elif event[0] == "append":
                events.append(BlockChange(block.index, _block_delta(block, event[2])))
            else:
                if block.kind == "reasoning":
                    events.append(BlockChange(block.index, SignatureDelta(SIGNATURE)))
                events.append(BlockStop(block.index))
                self._content.append(self._block(block, empty=False))
        return events

    def _block(self, block: Block, *, empty: bool) -> AnswerBlock:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return ThinkingBlock(thinking=text, signature="" if empty else SIGNATURE)
        if block.kind == "content":
            return TextBlock(text=text)
        return ToolUseBlock(
            id=self._tool_use_id, name=block.name, input={} if empty else tool_input(text)
        )


def _block_delta(block: Block, text: str) -> BlockDelta:
    if block.kind == "reasoning":
        return ThinkingDelta(text)
    if block.kind == "content":
        return TextDelta(text)
    return InputJsonDelta(text)
