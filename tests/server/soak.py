"""Clients that behave in every way at once, over a server process; see `test_soak.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from .sse_client import parse_events

CHAT = "/v1/chat/completions"
NUM_CLIENTS = 64
QUIET_SECONDS = 120.0
"""After this long without clients, what is still alive has leaked."""

Behaviour = Callable[["Client"], Awaitable[str]]


class Client:
    """One of the clients: it does one thing after another, each drawn from its own generator."""

    def __init__(self, port: int, session: aiohttp.ClientSession, seed: int) -> None:
        self.port = port
        self.session = session
        self.random = random.Random(seed)

    def body(self, **fields: Any) -> dict[str, Any]:
        """A chat of random size, with a prefix that many share."""
        text = "s" * self.random.choice((0, 16, 40)) + "".join(
            self.random.choices("abc é€😀", k=self.random.randint(1, 60))
        )
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.random.randint(1, 80),
            "ignore_eos": True,
            "n": self.random.choice((1, 1, 1, 2)),
            "temperature": self.random.choice((0, 1)),
            "priority": self.random.choice((0, 0, 0, -1, 1)),
        } | fields

    def request(self, **fields: Any) -> bytes:
        """The same as bytes for a raw socket."""
        raw = json.dumps(self.body(**fields)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        return head.encode() + raw

    @contextlib.asynccontextmanager
    async def connected(self, reset: bool = False) -> Any:
        """A raw connection, which ends in order or by a reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        try:
            yield reader, writer
        finally:
            if reset:
                raw = writer.get_extra_info("socket")
                linger = b"\x01\x00\x00\x00" + b"\x00" * 4
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def pause(self, most: float) -> None:
        await asyncio.sleep(self.random.random() * most)


async def stream(client: Client) -> str:
    """Read a stream to its end, which must be one."""
    async with client.session.post(CHAT, json=client.body(stream=True)) as response:
        text = await response.text()
        if response.status != 200:
            return check_refusal(response.status, text)
    events = parse_events(text)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return "stream"


async def whole(client: Client) -> str:
    """Take a whole answer."""
    async with client.session.post(CHAT, json=client.body()) as response:
        text = await response.text()
        if response.status != 200:
            return check_refusal(response.status, text)
    assert all(c["finish_reason"] == "length" for c in json.loads(text)["choices"])
    return "whole"


def check_refusal(status: int, text: str) -> str:
    error = json.loads(text)["error"]
    assert (status, error["code"]) in {(429, "queue_full"), (503, "queue_timeout")}, error
    return str(error["code"])


async def cut(client: Client) -> str:
    """Leave after some bytes of the answer, or before any."""
    async with client.connected(reset=client.random.random() < 0.5) as (reader, writer):
        writer.write(client.request(stream=client.random.random() < 0.7))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(client.random.random() * 0.5):
                await reader.read(client.random.randint(1, 2000))
    return "cut"


async def stall(client: Client) -> str:
    """Stop reading in the middle, then leave or go on."""
    async with client.connected() as (reader, writer):
        writer.write(client.request(stream=True, max_tokens=150, n=2))
        await reader.read(100)
        writer.transport.pause_reading()
        await client.pause(2.0)
        writer.transport.resume_reading()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(2.0):
                while await reader.read(1000):
                    pass
    return "stall"


async def garbage(client: Client) -> str:
    """Send what is not HTTP, not JSON or not a request."""
    bodies = (
        client.random.randbytes(200) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad\r\n\r\n",
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{]}" % CHAT.encode(),
        client.request(max_tokens=-1),
        client.request(messages=[{"role": "\x00", "content": 7}]),
        client.request(model="\x1b[31m"),
    )
    async with client.connected() as (reader, writer):
        writer.write(client.random.choice(bodies))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(5.0):
                answer = await reader.read(100)
                assert b" 4" in answer[:16], answer
    return "garbage"


async def half_body(client: Client) -> str:
    """Begin a body and leave, or let the server wait for it."""
    async with client.connected() as (_, writer):
        request = client.request()
        writer.write(request[: client.random.randint(1, len(request) - 1)])
        await client.pause(1.5)
    return "half body"


async def half_close(client: Client) -> str:
    """Close the sending side and take the answer, whatever it is."""
    async with client.connected() as (reader, writer):
        writer.write(client.request(stream=True))
        writer.write_eof()
        received = b""
        while piece := await reader.read(1000):
            received += piece
    assert b"[DONE]" in received or b'"code"' in received, received[-300:]
    return "half close"


async def look(client: Client) -> str:
    """Ask how the server is."""
    path = client.random.choice(("/health", "/metrics", "/load", "/v1/models", "/healthz"))
    async with client.session.get(path) as response:
        assert response.status == 200
        await response.read()
    return "look"


BEHAVIOURS: tuple[tuple[Behaviour, int], ...] = (
    (stream, 6),
    (whole, 4),
    (cut, 6),
    (stall, 2),
    (garbage, 2),
    (half_body, 1),
    (half_close, 2),
    (look, 1),
)


async def storm(port: int, seconds: float, seed: int) -> Counter[str]:
    """Let all clients do things for so long; returns how often each thing was done."""
    done: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + seconds
    choices, weights = zip(*BEHAVIOURS, strict=True)

    async def run(client: Client) -> None:
        while asyncio.get_running_loop().time() < end:
            [behaviour] = client.random.choices(choices, weights)
            done[await behaviour(client)] += 1
            await client.pause(0.05)

    # A connection for each: one that is idle may be closed just as the next request goes out.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url, connector=connector) as session:
        clients = [Client(port, session, seed + number) for number in range(NUM_CLIENTS)]
        await asyncio.gather(*map(run, clients))
    return done


async def fill_tokenizer_cache(session: aiohttp.ClientSession) -> None:
    """Let the tokenizer's cache reach its size, which takes the storm more than a minute.

    A BPE model of the tokenizers library keeps the first 10,000 words of at most 256 bytes that a
    thread has seen; the tiny model's words are whole texts between special tokens. Texts of fewer
    than 1,024 characters are encoded by the thread that encodes the storm's.
    """
    words, length = 9, 100
    for first in range(0, 10_800, words):
        text = "<user>".join(f"{number:0{length}}" for number in range(first, first + words))
        async with session.post("/tokenize", json={"prompt": text}) as response:
            assert (await response.json())["count"] == words * length + words - 1


async def until_quiet(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Wait until nothing is alive and every block is free; returns the engine's counters."""
    stats: dict[str, Any] = {}
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            while True:
                async with session.get("/healthz") as response:
                    stats = (await response.json())["stats"]
                async with session.get("/load") as response:
                    load = await response.json()
                alive = sum(
                    stats[f"num_requests_{kind}"] for kind in ("running", "waiting", "paused")
                )
                if not (alive or stats["kv_blocks_used"] or any(load.values())):
                    return stats
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"the server does not come to rest: {stats}") from None


def resident_bytes(pid: int) -> int:
    """Bytes of main memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")
