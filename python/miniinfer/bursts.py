"""What many connections are sent at once.

A step has a few bytes for each of many connections. Written one by one through asyncio, each is
a system call that lets go of the interpreter's lock, and waits for it where an engine's thread
wants it too: half a millisecond each time. Here all are gathered, and sent in one call.
"""

from __future__ import annotations

import asyncio

from ._core import send_each

__all__ = ["Burst", "Outlet"]


class Outlet:
    """Where one connection's bytes go: a transport of asyncio's, or past it to its socket."""

    __slots__ = ("descriptor", "pending", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.pending = b""
        socket = transport.get_extra_info("socket")
        encrypted = transport.get_extra_info("sslcontext") is not None
        self.descriptor = -1 if socket is None or encrypted else int(socket.fileno())


class Burst:
    """Gathers what a turn of the event loop writes, and sends it at the beginning of the next."""

    def __init__(self) -> None:
        self._outlets: list[Outlet] = []

    def write(self, outlet: Outlet, data: bytes) -> None:
        """Send bytes, after all that the transport has been given before."""
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
            else:
                # asyncio waits for room, or finds what is wrong.
                _write(outlet, count)


def _write(outlet: Outlet, start: int) -> None:
    data, outlet.pending = outlet.pending[start:], b""
    outlet.transport.write(data)
