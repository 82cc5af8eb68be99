"""Server-sent events over aiohttp, and the one way every stream is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from aiohttp import HttpVersion11, web

from miniinfer.bursts import Burst, Lane, Onward, Outlet

from .chunk_template import ChunkTemplate
from .connection import Connection
from .engine_api import Delta
from .errors import ApiError, internal
from .generation import DeltaSource
from .state import STATE

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_MOST_PENDING = 2**16
"""Bytes of one stream that may wait for the burst: as many as asyncio's transports let wait."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(payload: bytes) -> bytes:
    """Return one event; the payload is JSON, which never holds a line break."""
    return b"data: " + payload + b"\n\n"


def named_event(name: str, payload: bytes) -> bytes:
    """Return one event that has a name besides its payload of JSON."""
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """What an API's streams hold besides their events."""

    done: bytes = DONE
    """Comes at the end, after an error too."""
    keep_alive: bytes = _COMMENT
    """Sent after `keep_alive_interval` seconds of silence."""


_CHAT_FRAMING = Framing()


class StreamFormat(Protocol):
    """Turns deltas into events; each method returns zero or more whole events."""

    def start(self) -> bytes:
        """Return what comes before the first delta."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return one delta of one choice."""

    def end(self) -> bytes:
        """Return what comes after the last choice has finished."""

    def error(self, error: ApiError) -> bytes:
        """Return an error that comes instead of the rest."""


class EventStream:
    """The body of one SSE answer.

    The status line is sent with the first event, so that an error before it can still be an HTTP
    error. After `keep_alive_interval` seconds of silence `keep_alive` is sent instead, and the
    answer has begun. `await send` waits while the client does not read, `stalled_client_timeout`
    seconds at most: then the connection is cut, and a ConnectionError raised.
    """

    def __init__(
        self,
        request: web.Request,
        keep_alive_interval: float,
        stalled_client_timeout: float,
        keep_alive: bytes,
        burst: Burst,
    ) -> None:
        self._request = request
        self._filler = keep_alive
        self.response = web.StreamResponse(headers=_HEADERS)
        self._chunked = request.version >= HttpVersion11
        if not self._chunked:
            # Without chunks the end of the connection is the end of the body, even for a client
            # that asks to keep it.
            self.response.force_close()
        self._interval = keep_alive_interval
        self._stalled_client_timeout = stalled_client_timeout
        self._starting = asyncio.Lock()
        self._burst = burst
        self._outlet: Outlet | None = None
        self._told = 0
        self._last_write = time.monotonic()
        self._keep_alive: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the status line is out, and `send_now` may be used."""
        return self._outlet is not None

    async def started(self) -> bool:
        """Return whether the status line is out or on its way."""
        async with self._starting:
            return self.response.prepared

    async def __aenter__(self) -> Self:
        if self._interval > 0:
            self._keep_alive = asyncio.create_task(self._send_comments())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            await asyncio.gather(self._keep_alive, return_exceptions=True)
        self._recall()
        protocol = self._request.protocol
        if isinstance(protocol, Connection):
            protocol.outlet = None

    async def send(self, events: bytes) -> None:
        """Write whole events; nothing for empty bytes."""
        if not events:
            return
        if not self.response.prepared:
            async with self._starting:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        self._last_write = time.monotonic()
        self._burst.flush()
        self._recall()
        await self._in_time(self.response.write(events))
        if self._outlet is None and self._request.transport is not None:
            self._outlet = Outlet(self._request.transport)
            protocol = self._request.protocol
            if isinstance(protocol, Connection):
                protocol.outlet = self._outlet

    def _recall(self) -> None:
        """Have all that was written past the event loop counted, and nothing more written so."""
        outlet = self._outlet
        if outlet is not None:
            outlet.recall()
            self._request.writer.output_size += outlet.bypassed
            outlet.bypassed = 0

    def send_now(
        self,
        events: bytes,
        lane: Lane | None = None,
        template: ChunkTemplate | None = None,
        told: int = 0,
    ) -> bool:
        """Write whole events of an answer that has begun; nothing for empty bytes.

        They leave with those of other streams, all in one system call's time. Where there is a
        lane, those that fill the template follow by themselves; `told` is as in `Lane.open`. Return
        False when the client does not keep up: `drain` before the next.
        """
        self._recall()
        # Where tokens come merged there is more to send than the system takes one by one.
        merged = 0 < self._told < told - 1
        self._told = told
        if not events:
            return True
        outlet = self._outlet
        assert outlet is not None, "the answer has begun"
        if outlet.transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._last_write = time.monotonic()
        if self._chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._request.writer.output_size += len(events)
        self._burst.write(outlet, events)
        goes_on = not merged and self._may_go_on(outlet)
        if lane is not None and template is not None and goes_on:
            before, after, kind = template.before, template.after, template.kind
            outlet.onward = Onward(lane, before, after, self._chunked, kind, told)
        return not self._request.protocol.writing_paused and len(outlet.pending) < _MOST_PENDING

    def _may_go_on(self, outlet: Outlet) -> bool:
        # Only a connection that knows of the outlet stops it before the socket is closed.
        protocol = self._request.protocol
        return outlet.descriptor >= 0 and getattr(protocol, "outlet", None) is outlet

    async def drain(self) -> None:
        """Wait until the client has read, as `send` does."""
        self._burst.flush()
        await self._in_time(self._request.writer.drain())

    async def _in_time(self, written: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stalled_client_timeout):
                await written
        except TimeoutError:
            # Without this, aiohttp would wait for the same client to end the answer.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client does not read") from None

    async def _send_comments(self) -> None:
        while True:
            silence = time.monotonic() - self._last_write
            if self._outlet is not None and self._outlet.silence is not None:
                silence = min(silence, self._outlet.silence)
            if silence >= self._interval:
                await self.send(self._filler)
                silence = 0.0
            await asyncio.sleep(self._interval - silence)


async def respond_stream(
    request: web.Request,
    generation: DeltaSource,
    stream_format: StreamFormat,
    framing: Framing = _CHAT_FRAMING,
    *,
    template: Callable[[int], ChunkTemplate | None] | None = None,
) -> web.StreamResponse:
    """Answer a request with its deltas as they come, then `framing.done` exactly once.

    `template` says what the events of a choice look like if the next deltas bring text alone: such
    may then be written without `stream_format`.
    """
    state = request.app[STATE]
    config = state.config
    async with EventStream(
        request,
        config.keep_alive_interval,
        config.stalled_client_timeout,
        framing.keep_alive,
        state.burst,
    ) as events:
        try:
            await _send_deltas(events, generation, stream_format, template)
        except ConnectionError:
            # The client has gone, and `generation` has cancelled the engine's side.
            return events.response
        except asyncio.CancelledError:
            error = state.aborted()
            if error is None:
                raise
            await _fail(events, error, stream_format)
        except ApiError as error:
            await _fail(events, error, stream_format)
        except Exception:
            if not await events.started():
                raise
            request.app.logger.exception("a stream failed")
            await _fail(events, internal(), stream_format)
        await events.send(framing.done)
        return events.response


async def _send_deltas(
    events: EventStream,
    generation: DeltaSource,
    stream_format: StreamFormat,
    template: Callable[[int], ChunkTemplate | None] | None,
) -> None:
    def take(index: int, delta: Delta) -> bool:
        written = stream_format.delta(index, delta)
        if template is None:
            return events.send_now(written)
        onward = template(index)
        return events.send_now(written, lane, onward, delta.num_output_tokens)

    async with generation as deltas:
        start = stream_format.start
        async for index, delta in deltas:
            payload = start() + stream_format.delta(index, delta)
            await events.send(payload)
            if events.begun:
                break
            start = _nothing
        lane = None if template is None else deltas.lane()
        while await deltas.forward(take):
            await events.drain()
    await events.send(stream_format.end())


def _nothing() -> bytes:
    return b""


async def _fail(events: EventStream, error: ApiError, stream_format: StreamFormat) -> None:
    if not await events.started():
        raise error
    await events.send(stream_format.error(error))
