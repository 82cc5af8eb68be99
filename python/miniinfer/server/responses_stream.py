"""A response as it comes into being: deltas in, events out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .blocks import Block, BlockEvent, BlockReader, reasoning_tokens
from .chat_parts import ChoiceParts
from .engine_api import Delta
from .errors import ApiError
from .generation import Generation
from .responses_events import (
    ErrorEvent,
    Event,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    write,
)
from .responses_items import ItemWriter, item_writer
from .responses_logprobs import TextLogprobs
from .responses_objects import (
    IncompleteDetails,
    OutputItem,
    ResponseFailure,
    ResponseObject,
    response_usage,
)


class ResponseWriter:
    """Writes a response, whole or as events; see `sse.StreamFormat`.

    The whole response is the one in the last event, so both ways give the same. `ended` is called
    with it, also when it has failed, before that event is sent.
    """

    def __init__(
        self,
        response: ResponseObject,
        generation: Generation,
        parts: ChoiceParts,
        logprobs: TextLogprobs | None,
        ended: Callable[[ResponseObject], None],
    ) -> None:
        self._response = response
        self._generation = generation
        self._parts = parts
        self._logprobs = logprobs
        self._ended = ended
        self._blocks = BlockReader()
        self._writer: ItemWriter | None = None
        self._output: list[OutputItem] = []
        self._next_number = 0
        self._finish_reason: str | None = None

    def start(self) -> bytes:
        """Return the events before the first item."""
        created = ResponseCreated(response=self._response)
        return self._write([created, ResponseInProgress(response=self._response)])

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return what a delta adds to the items."""
        return self._write(self._take(delta))

    def end(self) -> bytes:
        """Return the ends of the last item and of the response."""
        return self._write(self._finish())

    def error(self, error: ApiError) -> bytes:
        """Return the failure of the response, or an error if there is no response yet."""
        if self._next_number == 0:
            return self._write(
                [ErrorEvent(code=error.code, message=error.message, param=error.param)]
            )
        self._response.status = "failed"
        self._response.error = ResponseFailure("server_error", error.message)
        self._end_response()
        return self._write([ResponseFailed(response=self._response)])

    async def whole_answer(self) -> ResponseObject:
        """Run the request to its end and return all of it."""
        async with self._generation as generation:
            async for _, delta in generation:
                self._take(delta)
        self._finish()
        return self._response

    def _take(self, delta: Delta) -> list[Event]:
        if self._logprobs is not None:
            self._logprobs.add(delta.logprobs)
        self._finish_reason = delta.finish_reason
        return self._events(self._blocks.read(self._parts.take(delta)), "completed")

    def _finish(self) -> list[Event]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        events = self._events(self._blocks.finish(), status)
        if not self._output:
            # Clients look for a message, even for one that has no text.
            empty = Block(0, "content")
            events += self._events([("open", empty, None), ("close", empty, None)], status)
        self._response.status = status
        if status == "incomplete":
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
            last: Event = ResponseIncomplete(response=self._response)
        else:
            self._response.completed_at = int(time.time())
            last = ResponseCompleted(response=self._response)
        self._end_response()
        return [*events, last]

    def _end_response(self) -> None:
        usage = self._generation.usage()
        reasoning = reasoning_tokens(self._blocks.blocks, usage.completion_tokens)
        self._response.output = self._output
        self._response.usage = response_usage(usage, reasoning)
        self._ended(self._response)

    def _events(self, block_events: Iterable[BlockEvent], status: str) -> list[Event]:
        """Return the events of blocks; those that end have `status`."""
        events: list[Event] = []
        for event in block_events:
            if event[0] == "open":
                self._writer = item_writer(event[1], self._logprobs)
                events += self._writer.begin()
                continue
            assert self._writer is not None, "a block begins before it gains text"
            if event[0] == "append":
                events.append(self._writer.append(event[2]))
            else:
                last, item = self._writer.end(status)
                events += last
                self._output.append(item)
        return events

    def _write(self, events: Iterable[Event]) -> bytes:
        written = b""
        for event in events:
            event.sequence_number = self._next_number
            self._next_number += 1
            written += write(event)
        return written
