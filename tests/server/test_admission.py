"""What is refused because there is too much to do, and what is ended for having waited."""

from __future__ import annotations

import asyncio

import pytest

from miniinfer.server.admission import RequestQueue
from miniinfer.server.config import ServerConfig
from miniinfer.server.state import STATE

from .fake import FakeDelta, Pause, answer
from .sse_client import read_events

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}
STREAM = {**BODY, "stream": True}


async def until(condition):
    """Wait for a condition; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.005)


def count_encodes(engine):
    """Count every use of the tokenizer from now on."""
    calls = []
    tokenizer = engine.tokenizer
    for name in ("encode", "encode_rendered", "apply_chat_template"):
        original = getattr(tokenizer, name)

        def counted(*args, original=original, **options):
            calls.append(args)
            return original(*args, **options)

        setattr(tokenizer, name, counted)
    return calls


async def hold(client, engine, body=STREAM, **options):
    """Start a request that waits for its first token; returns its task and its pause."""
    pause = Pause()
    engine.script = lambda ids, params: [pause, *answer(params, ["b"])]
    task = asyncio.create_task(client.post(CHAT, json=body, **options))
    await pause.reached.wait()
    return task, pause


@pytest.mark.parametrize(
    ("limits", "code", "flag"),
    [
        ({"max_queued_requests": 1}, "queue_full", "--max-queued-requests)"),
        ({"max_queued_tokens": 5}, "queue_tokens_full", "--max-queued-tokens)"),
        (
            {"max_queued_requests_per_key": 1},
            "key_queue_full",
            "--max-queued-requests-per-key)",
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_refuses_before_tokenising(start, engine, limits, code, flag, stream):
    client = await start(engine, **limits)
    task, pause = await hold(client, engine)
    encodes = count_encodes(engine)
    for path, body in (
        (CHAT, {**BODY, "stream": stream}),
        ("/v1/completions", {"prompt": "hey", "stream": stream}),
        ("/generate", {"prompt": "hey", "stream": stream}),
        ("/v1/responses", {"input": "hey", "stream": stream}),
    ):
        async with client.post(path, json=body) as response:
            assert response.status == 429
            error = (await response.json())["error"]
        assert error["code"] == code
        assert flag in error["message"]
        assert error["type"] == "rate_limit_error"
        assert int(response.headers["Retry-After"]) >= 1
    assert encodes == []
    async with client.get("/ready") as ready:
        assert ready.status == 503
        assert await ready.json() == {"status": "overloaded"}
    async with client.get("/health") as health:
        assert health.status == 200
    pause.go.set()
    await read_events(await task)
    async with client.get("/ready") as ready:
        assert await ready.json() == {"status": "ok"}
    async with client.get("/metrics") as metrics:
        text = await metrics.text()
    assert f'admission_rejections_total{{model_name="fake-model",reason="{code}"}} 4.0' in text


async def test_a_burst_is_counted_before_it_is_tokenised(start, engine):
    client = await start(engine, max_queued_requests=4)
    pause = Pause()
    engine.script = lambda ids, params: [pause, *answer(params, ["b"])]
    encodes = count_encodes(engine)
    tasks = [asyncio.create_task(client.post(CHAT, json=STREAM)) for _ in range(20)]
    await until(lambda: sum(task.done() for task in tasks) == 16)
    # Each was rendered and encoded.
    assert len(encodes) == 8
    pause.go.set()
    statuses = sorted(response.status for response in await asyncio.gather(*tasks))
    assert statuses == [200] * 4 + [429] * 16


async def test_a_request_leaves_the_queue_with_its_first_token(start, engine):
    client = await start(engine, max_queued_requests=1)
    pause = Pause()
    engine.script = lambda ids, params: [
        FakeDelta(num_output_tokens=1),
        pause,
        *answer(params, "b"),
    ]
    first = asyncio.create_task(client.post(CHAT, json=BODY))
    await pause.reached.wait()
    queue = client.app[STATE].queue
    assert (queue.num_requests, queue.num_tokens) == (0, 0)
    engine.script = lambda ids, params: answer(params, ["b"])
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 200
    pause.go.set()
    assert (await first).status == 200


async def test_each_key_has_its_own_share_of_the_queue(start, engine):
    client = await start(engine, api_keys=("one", "two"), max_queued_requests_per_key=1)
    headers = {"Authorization": "Bearer one"}
    task, pause = await hold(client, engine, headers=headers)
    async with client.post(CHAT, json=BODY, headers=headers) as response:
        assert response.status == 429
    engine.script = lambda ids, params: answer(params, ["b"])
    async with client.post(CHAT, json=BODY, headers={"X-Api-Key": "two"}) as response:
        assert response.status == 200
    pause.go.set()
    await read_events(await task)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_waiting_too_long_is_503(start, engine, body):
    client = await start(engine, max_queue_time=0.05)
    engine.script = lambda ids, params: [Pause()]
    async with client.post(CHAT, json=body) as response:
        assert response.status == 503
        error = (await response.json())["error"]
    assert error["code"] == "queue_timeout"
    assert "--max-queue-time" in error["message"]
    assert engine.requests[0].stream.cancelled
    assert client.app[STATE].queue.num_requests == 0


async def test_waiting_too_long_after_a_comment_is_an_event(start, engine):
    client = await start(engine, max_queue_time=0.2, keep_alive_interval=0.02)
    engine.script = lambda ids, params: [Pause()]
    async with client.post(CHAT, json=STREAM) as response:
        [event] = await read_events(response)
    assert event["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_first_token_ends_the_wait(start, engine, body):
    client = await start(engine, max_queue_time=0.1)
    engine.script = lambda ids, params: [FakeDelta(num_output_tokens=1), 0.3, *answer(params, "b")]
    async with client.post(CHAT, json=body) as response:
        assert response.status == 200
        assert '"b"' in await response.text()


async def test_several_prompts_leave_one_by_one(start, engine):
    client = await start(engine)
    pauses = {97: Pause(), 98: Pause()}
    engine.script = lambda ids, params: [pauses[ids[0]], *answer(params, ["x"])]
    body = {"prompt": ["aaa", "bb"]}
    task = asyncio.create_task(client.post("/v1/completions", json=body))
    await pauses[97].reached.wait()
    await pauses[98].reached.wait()
    queue = client.app[STATE].queue
    assert (queue.num_requests, queue.num_tokens) == (1, 5)
    pauses[97].go.set()
    await until(lambda: queue.num_tokens == 2)
    assert queue.num_requests == 1
    pauses[98].go.set()
    assert (await task).status == 200
    assert (queue.num_requests, queue.num_tokens) == (0, 0)


def test_retry_after_follows_the_measured_rate():
    now = 0.0
    queue = RequestQueue(ServerConfig(), clock=lambda: now)
    assert queue.retry_after() == 5
    for _ in range(11):
        ticket = queue.enter()
        ticket.submitted(0, 100)
        now += 2.0
        ticket.answered(0)
    waiting = [queue.enter() for _ in range(10)]
    # A request and a hundred tokens every two seconds.
    assert queue.retry_after() == 20
    waiting[0].submitted(0, 1500)
    assert queue.retry_after() == 30
    waiting[1].submitted(0, 100_000)
    assert queue.retry_after() == 120
    for ticket in waiting:
        ticket.close()
        ticket.close()
    assert (queue.num_requests, queue.num_tokens) == (0, 0)
