"""Requests as uncommon HTTP clients send them: HTTP/1.0, HEAD, compressed bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib

import pytest

from .real import PATIENCE
from .sse_client import check_chat_chunks, parse_events

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}
RAW = json.dumps(BODY).encode()


async def ask_in_http_1_0(client, *, headers=(), **fields):
    """Return the head and the body of the answer, which ends with the connection."""
    raw = json.dumps({**BODY, **fields}).encode()
    lines = [f"POST {CHAT} HTTP/1.0", f"Content-Length: {len(raw)}", *headers, "", ""]
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        writer.write("\r\n".join(lines).encode() + raw)
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head.lower()
    assert head.startswith("HTTP/1.0 200")
    return head, body


async def test_http_1_0(client):
    _, body = await ask_in_http_1_0(client)
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
async def test_the_connection_ends_with_a_stream_in_http_1_0(client, headers):
    head, body = await ask_in_http_1_0(client, headers=headers, stream=True)
    assert "connection: keep-alive" not in head.lower()
    *events, done = parse_events(body)
    assert done == "[DONE]"
    assert check_chat_chunks([json.loads(event) for event in events]) == {0: "Hello"}


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/openapi.json", "/metrics"])
async def test_head_is_get_without_a_body(client, path):
    async with client.get(path) as response:
        expected = response.headers["Content-Type"]
    async with client.head(path) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == expected
        assert await response.read() == b""


# Without the time of day, which would make other names of the tests each second.
PACKED = gzip.compress(RAW, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "raw"),
    [("gzip", PACKED), ("deflate", zlib.compress(RAW))],
    ids=("gzip", "deflate"),
)
async def test_compressed_bodies(client, engine, encoding, raw):
    async with client.post(CHAT, data=raw, headers={"Content-Encoding": encoding}) as response:
        assert response.status == 200
    assert bytes(engine.requests[0].token_ids).startswith(b"hey")


@pytest.mark.parametrize(
    "raw",
    [RAW, b"{}", PACKED[:-12], PACKED + b"junk", b"\x1f\x8b"],
    ids=("plain", "empty", "cut", "junk", "magic"),
)
async def test_broken_compressed_bodies(client, engine, caplog, raw):
    # Twice, for what is left of the first must not be read as the second.
    for _ in range(2):
        async with client.post(CHAT, data=raw, headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] in ("invalid_body", "invalid_json")
    assert not engine.requests
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_body_that_is_too_large_unpacked(start, engine):
    client = await start(engine, max_body_size=10_000)
    raw = gzip.compress(b" " * 10_000_000)
    async with client.post(CHAT, data=raw, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
