"""Streams that the core writes past the event loop: the same bytes, whatever the client does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from miniinfer import AsyncLLM
from miniinfer.bursts import Outlet
from miniinfer.server.generation import Generation

from .real import PATIENCE, real_server, until_idle
from .sse_client import parse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], **FIELDS},
    COMPLETIONS: {"prompt": "a b c", **FIELDS},
}


class Spy:
    """What went past the event loop, and whether sockets were open when that ended."""

    def __init__(self) -> None:
        self.bypassed = 0
        self.recalls = 0
        self.send_buffer = 0
        self.open: list[bool] = []


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy, recall, go_on = Spy(), Outlet.recall, Outlet.go_on

    def recalling(outlet: Outlet) -> None:
        before, goes_on = outlet.bypassed, outlet._lane is not None
        recall(outlet)
        spy.bypassed += outlet.bypassed - before
        if outlet.bypassed > before or goes_on:
            spy.recalls += 1
            spy.open.append(outlet.transport.get_extra_info("socket").fileno() >= 0)

    def going_on(outlet: Outlet) -> None:
        if spy.send_buffer:
            connection = outlet.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, spy.send_buffer)
        go_on(outlet)

    monkeypatch.setattr(Outlet, "recall", recalling)
    monkeypatch.setattr(Outlet, "go_on", going_on)
    return spy


def pace(llm: AsyncLLM, seconds: float) -> None:
    """Have each step take longer, as a model's does."""
    run = llm.engine.runner.run

    def slowly(buffers: Any) -> Any:
        time.sleep(seconds)
        return run(buffers)

    llm.engine.runner.run = slowly  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def connected(
    url: str, receive_buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = urlsplit(url)
    near = socket.socket()
    if receive_buffer:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    near.setblocking(False)
    await asyncio.get_running_loop().sock_connect(near, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=near, limit=2**12)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(path: str, max_tokens: int, version: str = "1.1") -> bytes:
    body = json.dumps({**BODIES[path], "max_tokens": max_tokens, "stream": True})
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def body_of(raw: bytes) -> str:
    """The body of an answer, its chunks put together and each of them checked."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest.decode()

    def chunks(rest: bytes) -> Iterator[bytes]:
        while True:
            length, _, rest = rest.partition(b"\r\n")
            size = int(length, 16)
            assert rest[size : size + 2] == b"\r\n"
            if size == 0:
                assert rest == b"\r\n"
                return
            assert rest[:size].endswith(b"\n\n"), "an event is a chunk of its own"
            yield rest[:size]
            rest = rest[size + 2 :]

    return b"".join(chunks(rest)).decode()


def texts_of(raw: bytes) -> list[str]:
    """The texts of a stream's events, after a look at its end."""
    *events, last, done = parse_events(body_of(raw))
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert all(choice["finish_reason"] is None for choice in choices)
    if "delta" in choices[0]:
        return [choice["delta"]["content"] for choice in choices[1:]]
    return [choice["text"] for choice in choices]


async def whole_text(url: str, path: str, max_tokens: int) -> str:
    async with aiohttp.ClientSession(url) as session:
        body = {**BODIES[path], "max_tokens": max_tokens}
        async with session.post(path, json=body) as response:
            choice = (await response.json())["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_text_is_whole_and_most_of_it_passes_the_loop(
    tiny_model: Path, spy: Spy, path: str, version: str
) -> None:
    async with real_server(tiny_model) as (url, llm):
        expected = await whole_text(url, path, 60)
        pace(llm, 0.005)
        async with connected(url) as (reader, writer):
            writer.write(post(path, 60, version))
            raw = await reader.read(-1)
        assert "".join(texts_of(raw)) == expected
        assert spy.bypassed > len(raw) / 4
        assert all(spy.open)
        await until_idle(llm)


async def test_streams_that_are_behind_are_whole_too(tiny_model: Path, spy: Spy) -> None:
    async def stream(url: str) -> list[str]:
        async with connected(url) as (reader, writer):
            writer.write(post(COMPLETIONS, 150))
            return texts_of(await reader.read(-1))

    async with real_server(tiny_model) as (url, llm):
        expected = await whole_text(url, COMPLETIONS, 150)
        for _ in range(3):
            found = await asyncio.gather(*(stream(url) for _ in range(8)))
            assert {"".join(texts) for texts in found} == {expected}
        await until_idle(llm)


async def test_a_client_that_reads_late_gets_everything(tiny_model: Path, spy: Spy) -> None:
    spy.send_buffer = 2**11
    async with real_server(tiny_model) as (url, llm):
        expected = await whole_text(url, COMPLETIONS, 150)
        pace(llm, 0.002)
        async with connected(url, 2**11) as (reader, writer):
            writer.write(post(COMPLETIONS, 150))
            raw = await reader.readuntil(b"data: ")
            async with asyncio.timeout(PATIENCE):
                while llm.stats()["num_requests_running"]:
                    await asyncio.sleep(0.01)
            assert spy.bypassed
            raw += await reader.read(-1)
        assert "".join(texts_of(raw)) == expected
        await until_idle(llm)


@pytest.mark.parametrize("rudely", [True, False])
async def test_a_client_that_leaves_ends_its_request(
    tiny_model: Path, spy: Spy, rudely: bool
) -> None:
    async with real_server(tiny_model) as (url, llm):
        pace(llm, 0.02)
        async with connected(url) as (reader, writer):
            writer.write(post(COMPLETIONS, 190))
            await reader.readuntil(b"data: ")
            async with asyncio.timeout(PATIENCE):
                for _ in range(3):
                    await reader.readuntil(b"data: ")
            if rudely:
                # Nothing of a close that waits: the peer is told with a reset.
                linger = b"\1\0\0\0\0\0\0\0"
                near = writer.get_extra_info("socket")
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await until_idle(llm)
        assert llm.stats()["finished_abort"] == 1
        assert spy.bypassed
        # The core has let go of a socket before its descriptor can be another's.
        assert spy.open
        assert all(spy.open)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_half_closed_client_gets_its_answer_between_comments(
    tiny_model: Path, spy: Spy, version: str
) -> None:
    async with real_server(tiny_model) as (url, llm):
        expected = await whole_text(url, COMPLETIONS, 40)
        pace(llm, 0.01)
        async with connected(url) as (reader, writer):
            writer.write(post(COMPLETIONS, 40, version))
            raw = await reader.readuntil(b"data: ")
            writer.write_eof()
            raw += await reader.read(-1)
        assert "".join(texts_of(raw)) == expected
        assert b": keep-alive\n\n" in raw
        assert spy.bypassed
        await until_idle(llm)


@pytest.mark.parametrize(("pause", "comments"), [(0.25, True), (0.01, False)])
async def test_only_silence_is_filled_with_comments(
    tiny_model: Path, spy: Spy, pause: float, comments: bool
) -> None:
    interval = 0.1 if comments else 5.0
    async with real_server(tiny_model, keep_alive_interval=interval) as (url, llm):
        expected = await whole_text(url, COMPLETIONS, 8)
        pace(llm, pause)
        async with connected(url) as (reader, writer):
            writer.write(post(COMPLETIONS, 8))
            raw = await reader.read(-1)
        assert "".join(texts_of(raw)) == expected
        assert (b": keep-alive\n\n" in raw) is comments
        # A comment takes the stream back for an event, and here each has one before it.
        assert spy.recalls if comments else spy.bypassed


async def test_what_passed_by_is_counted_of_a_request_that_was_left(
    tiny_model: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    leave = Generation.__aexit__

    async def leaving(generation: Generation, *exc: Any) -> None:
        await leave(generation, *exc)
        counted.append(generation.usage().completion_tokens)

    monkeypatch.setattr(Generation, "__aexit__", leaving)
    async with real_server(tiny_model) as (url, llm):
        pace(llm, 0.02)
        async with connected(url) as (reader, writer):
            writer.write(post(COMPLETIONS, 190))
            for _ in range(8):
                await reader.readuntil(b"data: ")
        await until_idle(llm)
    assert spy.bypassed
    assert 8 <= counted[0] < 190
