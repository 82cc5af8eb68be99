"""What many connections are sent at once.

A step has a few bytes for each of many connections. Written one by one through asyncio, each is
a system call that lets go of the interpreter's lock, and waits for it where an engine's thread
wants it too: half a millisecond each time. Here all are gathered, and sent in one call.

What has left whole may be followed by what the core writes itself, with no turn of the event loop:
a connection whose next events differ in their text alone goes on in a `Lane`.
"""

from __future__ import annotations

import asyncio
from asyncio.trsock import TransportSocket
from typing import Literal, NamedTuple

from ._core import Lane, send_each

__all__ = ["Burst", "Lane", "Onward", "Outlet"]


class Onward(NamedTuple):
    """How a stream may go on past the event loop: see `Lane.open`."""

    lane: Lane
    before: bytes
    after: bytes
    chunked: bool
    text: Literal["whole", "content", "reasoning"]
    told: int


class Outlet:
    """Where one connection's bytes go: a transport of asyncio's, or past it to its socket."""

    __slots__ = ("_lane", "_last_lane", "bypassed", "descriptor", "onward", "pending", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.pending = b""
        self.onward: Onward | None = None
        """How it goes on when all that is pending has left."""
        self.bypassed = 0
        """Bytes that went another way than through here."""
        self._lane: Lane | None = None
        self._last_lane: Lane | None = None
        socket = transport.get_extra_info("socket")
        encrypted = transport.get_extra_info("sslcontext") is not None
        # Only asyncio's own transports are known to say that they are lost before they close the
        # socket, whose descriptor may be another's a moment later.
        known = isinstance(socket, TransportSocket) and not encrypted
        self.descriptor = int(socket.fileno()) if known else -1

    @property
    def silence(self) -> float | None:
        """Seconds since the core last wrote, whether or not it may still; None if it never did."""
        return None if self._last_lane is None else self._last_lane.silence()

    def go_on(self) -> None:
        """Let the core write, if that is how it goes on."""
        onward, self.onward = self.onward, None
        if onward is not None:
            self._lane = self._last_lane = onward.lane
            self._lane.open(self.descriptor, *onward[1:])

    def recall(self) -> None:
        """Have the core write nothing more: before anything else is written, or the socket closed.

        What it could not send whole goes to the transport.
        """
        self.onward = None
        if self._lane is None:
            return
        rest, count = self._lane.close()
        self._lane = None
        self.bypassed += count
        if rest:
            self.transport.write(rest)


class Burst:
    """Gathers what a turn of the event loop writes, and sends it at the beginning of the next."""

    def __init__(self) -> None:
        self._outlets: list[Outlet] = []

    def write(self, outlet: Outlet, data: bytes) -> None:
        """Send bytes, after all that the transport and the core have been given before."""
        outlet.recall()
        if not self._outlets:
            asyncio.get_running_loop().call_soon(self.flush)
        if not outlet.pending:
            self._outlets.append(outlet)
        outlet.pending += data

    def flush(self) -> None:
        """Send what has been gathered: needed before a transport is written to by itself."""
        outlets, self._outlets = self._outlets, []
        direct = []
        for outlet in outlets:
            transport = outlet.transport
            if transport.is_closing():
                outlet.pending = b""
            elif outlet.descriptor < 0 or transport.get_write_buffer_size():
                _write(outlet, 0)
            else:
                direct.append(outlet)
        sent = send_each([(outlet.descriptor, outlet.pending) for outlet in direct])
        for outlet, count in zip(direct, sent, strict=True):
            if count == len(outlet.pending):
                outlet.pending = b""
                outlet.go_on()
            else:
                # asyncio waits for room, or finds what is wrong.
                _write(outlet, count)


def _write(outlet: Outlet, start: int) -> None:
    data, outlet.pending = outlet.pending[start:], b""
    outlet.transport.write(data)
