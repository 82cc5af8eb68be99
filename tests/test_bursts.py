"""What many connections are sent at once: order, room, ends, and encryption."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from miniinfer.bursts import Burst, Onward, Outlet

_MUCH = bytes(range(256)) * 2**16


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A transport, and the socket that reads what it is given."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
    with far:
        yield transport, far
        transport.abort()


async def read(far: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    got = b""
    async with asyncio.timeout(60):
        while len(got) < count:
            piece = await loop.sock_recv(far, 2**20)
            assert piece, "it was closed"
            got += piece
    return got


async def test_all_of_a_turn_leaves_in_the_next_in_its_order() -> None:
    burst = Burst()
    async with connected() as (one, far_one), connected() as (two, far_two):
        first, second = Outlet(one), Outlet(two)
        for data in (b"a", b"b"):
            burst.write(first, data)
            burst.write(second, data * 2)
        assert first.pending == b"ab"
        await asyncio.sleep(0)
        assert (first.pending, second.pending) == (b"", b"")
        assert await read(far_one, 2) == b"ab"
        assert await read(far_two, 4) == b"aabb"


async def test_what_does_not_fit_follows_and_nothing_passes_it() -> None:
    burst = Burst()
    async with connected() as (transport, far):
        outlet = Outlet(transport)
        burst.write(outlet, _MUCH)
        burst.flush()
        assert 0 < transport.get_write_buffer_size() < len(_MUCH)
        burst.write(outlet, b"later")
        burst.flush()
        assert await read(far, len(_MUCH) + 5) == _MUCH + b"later"


async def test_a_flush_puts_it_before_what_the_transport_gets_next() -> None:
    burst = Burst()
    async with connected() as (transport, far):
        burst.write(Outlet(transport), b"first")
        burst.flush()
        transport.write(b"second")
        burst.flush()
        assert await read(far, 11) == b"firstsecond"


class Lane:
    """As the core's lane looks to an outlet."""

    def open(self, descriptor: int, *route: Any) -> None:
        assert descriptor >= 0

    def close(self) -> tuple[bytes, int]:
        return b"", 5

    def silence(self) -> float | None:
        return 0.25


async def test_what_the_core_wrote_last_is_known_when_it_writes_no_more() -> None:
    async with connected() as (transport, _):
        outlet = Outlet(transport)
        assert outlet.silence is None
        outlet.onward = Onward(Lane(), b"", b"", True, "whole", 1)  # type: ignore[arg-type]
        outlet.go_on()
        assert outlet.silence == 0.25
        outlet.recall()
        assert outlet.bypassed == 5
        assert outlet.silence == 0.25


async def test_one_that_has_gone_keeps_nobody() -> None:
    burst = Burst()
    async with connected() as (gone, far_gone), connected() as (there, far):
        broken, closed, sound = Outlet(gone), Outlet(gone), Outlet(there)
        far_gone.close()
        burst.write(broken, b"lost")
        burst.write(sound, b"kept")
        burst.flush()
        assert await read(far, 4) == b"kept"
        gone.abort()
        burst.write(closed, b"lost")
        burst.write(sound, b"kept")
        burst.flush()
        assert (broken.pending, closed.pending) == (b"", b"")
        assert await read(far, 4) == b"kept"


async def test_what_must_be_encrypted_goes_through_the_transport() -> None:
    class Encrypted:
        """As asyncio's transport of TLS looks to us."""

        def __init__(self) -> None:
            self.written: list[bytes] = []

        def get_extra_info(self, name: str) -> object:
            return {"socket": socket.socket, "sslcontext": object()}[name]

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.written.append(data)

    transport = Encrypted()
    burst, outlet = Burst(), Outlet(transport)  # type: ignore[arg-type]
    burst.write(outlet, b"ab")
    burst.write(outlet, b"c")
    burst.flush()
    assert transport.written == [b"abc"]
