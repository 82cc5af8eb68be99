"""What goes wrong in the middle: engine failures, clients that leave, silence, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest

from miniinfer.server.run import drain
from miniinfer.server.state import STATE

from .fake import FakeDelta, Pause, answer
from .sse_client import check_chat_chunks, parse_events, read_events

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}
STREAM = {**BODY, "stream": True}


def failing(step, after=2):
    pieces = [FakeDelta("a", num_output_tokens=i + 1) for i in range(after)]
    return lambda ids, params: [*pieces, step]


FAILURES = [
    FakeDelta("", finish_reason="error", error="out of memory"),
    FakeDelta("", finish_reason="abort"),
    RuntimeError("a defect"),
    ValueError("a defect"),
    StopAsyncIteration(),
]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_v40_v72_error_in_the_middle_of_a_stream(client, engine, failure):
    engine.script = failing(failure)
    async with client.post(CHAT, json=STREAM) as response:
        events = await read_events(response)
    *chunks, error = events
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert all(choice["finish_reason"] is None for c in chunks for choice in c["choices"])
    assert engine.requests[0].stream.cancelled


async def test_v40_the_connection_ends_with_the_stream_that_failed(client, engine):
    engine.script = failing(FAILURES[0], after=2)
    async with client.post(CHAT, json=STREAM) as response:
        events = await read_events(response)
        assert response.content.at_eof()
    assert "error" in events[-1]
    async with client.post(CHAT, json={**STREAM, "n": 0}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "n"


async def test_a_form_that_cannot_be_followed_is_the_requests_fault(client, engine):
    error = "the grammar cannot be followed: lexer error: too many expressions"
    failure = FakeDelta("", finish_reason="error", error=error)
    engine.script = failing(failure)
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 400
        body = await response.json()
    assert body["error"]["param"] == "structured_outputs"
    async with client.post(CHAT, json=STREAM) as response:
        events = await read_events(response)
    assert events[-1] == body
    tool = {"type": "function", "function": {"name": "roll"}}
    forced = {**BODY, "tools": [tool], "tool_choice": "required"}
    async with client.post(CHAT, json=forced) as response:
        assert (await response.json())["error"]["param"] == "tools"


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("stream", [True, False])
async def test_error_before_the_first_token_is_an_http_error(client, engine, failure, stream):
    engine.script = failing(failure, after=0)
    async with client.post(CHAT, json={**BODY, "stream": stream}) as response:
        body = await response.json()
        assert response.status in (500, 503)
    assert body["error"]["message"]
    assert "a defect" not in body["error"]["message"]
    assert engine.requests[0].stream.cancelled


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_error_in_a_whole_answer(client, engine, failure):
    engine.script = failing(failure)
    async with client.post("/v1/completions", json={"prompt": ["a", "b"]}) as response:
        assert response.status in (500, 503)
        assert "error" in await response.json()
    assert all(request.stream.cancelled for request in engine.requests)


async def test_dead_engine(client, engine):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause, RuntimeError("gone")]
    whole = asyncio.create_task(client.post(CHAT, json=BODY))
    streamed = asyncio.create_task(client.post(CHAT, json=STREAM))
    await pause.reached.wait()
    engine.die("CUDA error: device lost")
    pause.go.set()
    response = await whole
    assert response.status == 503
    assert "device lost" in (await response.json())["error"]["message"]
    events = await read_events(await streamed)
    assert events[-1]["error"]["code"] == "engine_dead"
    async with client.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["status"] == "dead"
    async with client.post(CHAT, json=STREAM) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "engine_dead"


async def test_submit_to_an_engine_that_has_just_died(client, engine):
    engine.refuse = RuntimeError("dead")
    original = engine.submit

    def submit(*args, **options):
        engine.die()
        return original(*args, **options)

    engine.submit = submit
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 503


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_client_leaves_before_the_first_token(client, engine, body):
    pause = Pause()
    engine.script = lambda ids, params: [pause]
    task = asyncio.create_task(client.post(CHAT, json=body))
    await pause.reached.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: engine.requests[0].stream.cancelled)
    await until(lambda: client.app[STATE].num_active == 0)


@pytest.mark.parametrize("prompts", [1, 3])
async def test_client_leaves_in_the_middle_of_a_stream(client, engine, prompts):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause]
    body = {"prompt": ["a"] * prompts, "stream": True}
    response = await client.post("/v1/completions", json=body)
    await response.content.readline()
    response.close()
    await until(lambda: all(request.stream.cancelled for request in engine.requests))
    await until(lambda: client.app[STATE].num_active == 0)
    assert len(engine.requests) == prompts


async def test_client_that_stops_reading_slows_only_itself(client, engine):
    produced = 0

    def script(ids, params):
        nonlocal produced
        if ids == [98]:
            yield from answer(params, ["quick"])
            return
        for _ in range(2000):
            produced += 1
            yield FakeDelta("x" * 10_000)
        yield FakeDelta("", finish_reason="length")

    engine.script = script
    slow = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    async with client.post("/v1/completions", json={"prompt": "b"}) as response:
        assert (await response.json())["choices"][0]["text"] == "quick"
    await asyncio.sleep(0.2)
    assert produced < 2000
    events = await read_events(slow)
    assert sum(len(event["choices"][0]["text"]) for event in events) == 20_000_000


async def test_silence_is_filled_with_comments(start, engine):
    client = await start(engine, keep_alive_interval=0.05)
    engine.script = lambda ids, params: [0.2, FakeDelta("a"), 0.2, *answer(params, ["b"])]
    async with client.post(CHAT, json=STREAM) as response:
        text = await response.text()
    assert text.startswith(": keep-alive\n\n")
    assert text.count(": keep-alive\n\n") >= 4
    events = [json.loads(event) for event in parse_events(text)[:-1]]
    assert check_chat_chunks(events) == {0: "ab"}


async def test_error_after_a_comment_is_an_event(start, engine):
    client = await start(engine, keep_alive_interval=0.05)
    engine.script = lambda ids, params: [0.2, FakeDelta("", finish_reason="error", error="no")]
    async with client.post(CHAT, json=STREAM) as response:
        [event] = await read_events(response)
    assert event["error"]["message"] == "no"


async def test_no_comments_when_turned_off(start, engine):
    client = await start(engine, keep_alive_interval=0)
    engine.script = lambda ids, params: [0.1, *answer(params, ["b"])]
    async with client.post(CHAT, json=STREAM) as response:
        assert ": keep-alive" not in await response.text()


async def test_drain_lets_requests_finish_and_refuses_new_ones(client, engine):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause, *answer(params, ["b"])]
    response = await client.post(CHAT, json=STREAM)
    await pause.reached.wait()
    draining = asyncio.create_task(drain(client.app[STATE], 30))
    await asyncio.sleep(0)
    async with client.post(CHAT, json=BODY) as refused:
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "shutting_down"
    async with client.get("/health") as health:
        assert health.status == 503
        assert (await health.json())["status"] == "draining"
    pause.go.set()
    assert check_chat_chunks(await read_events(response)) == {0: "ab"}
    await draining
    assert not client.app[STATE].aborting


async def test_drain_ends_what_does_not_finish(client, engine):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause]
    response = await client.post(CHAT, json=STREAM)
    whole = asyncio.create_task(client.post(CHAT, json=BODY))
    await until(lambda: len(engine.requests) == 2)
    await drain(client.app[STATE], 0.05)
    events = await read_events(response)
    assert events[-1]["error"]["code"] == "shutting_down"
    answered = await whole
    assert answered.status == 503
    assert (await answered.json())["error"]["code"] == "shutting_down"
    assert all(request.stream.cancelled for request in engine.requests)
    assert client.app[STATE].num_active == 0


async def test_concurrency_limit(start, engine):
    client = await start(engine, max_concurrent_requests=1)
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause, *answer(params, ["b"])]
    response = await client.post(CHAT, json=STREAM)
    async with client.post(CHAT, json=BODY) as refused:
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "overloaded"
        assert refused.headers["Retry-After"]
    async with client.get("/load") as load:
        assert (await load.json())["server_load"] == 1
    pause.go.set()
    await read_events(response)
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 200


async def test_storm_leaves_nothing_behind(client, engine):
    engine.script = lambda ids, params: [FakeDelta("a"), 0.01, *answer(params, ["b", "c"])]

    async def one(number):
        body = {"prompt": ["a", "b"], "n": 2, "stream": number % 2 == 0}
        with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(0.02 if number % 3 == 0 else 10):
                async with client.post("/v1/completions", json=body) as response:
                    await response.read()

    await asyncio.gather(*(one(number) for number in range(60)))
    await until(lambda: client.app[STATE].num_active == 0)
    assert all(request.stream.cancelled for request in engine.requests)


async def until(condition):
    """Wait for a condition; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_client_that_never_reads_is_cut_off(start, engine):
    # More than the sockets' buffers take, on both sides.
    pieces = [FakeDelta("x" * 1_000_000, num_output_tokens=i + 1) for i in range(30)]
    engine.script = lambda ids, params: [*pieces, FakeDelta("", finish_reason="length")]
    client = await start(engine, stalled_client_timeout=0.2, max_concurrent_requests=1)
    body = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1024)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    writer.write(head + body)
    await reader.readexactly(12)
    writer.transport.pause_reading()
    try:
        async with asyncio.timeout(30):
            while client.app[STATE].num_active:
                await asyncio.sleep(0.01)
        assert engine.requests[0].stream.cancelled
        # Its place is free for another.
        engine.script = lambda ids, params: answer(params, ["hello"])
        async with client.post(CHAT, json=BODY) as response:
            assert response.status == 200
        writer.transport.resume_reading()
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1_000_000):
                received += piece
        assert b"[DONE]" not in received
    finally:
        writer.close()
