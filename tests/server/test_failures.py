"""A real engine that fails in every way, and clients that leave in every state."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from typing import Any

import aiohttp
import pytest
import torch

import tiny
from miniinfer.errors import KVCacheError
from miniinfer.model.kv_cache import KVCache

from .fake import FakeDelta
from .real import PATIENCE, real_server, until_idle
from .sse_client import check_chat_chunks, parse_events, read_events
from .test_process import command, finish, running_server, stream_of
from .test_real_engine import CHAT, body, served_process


def with_steps(llm: Any, before: Any) -> Any:
    """Call `before(number)` ahead of each forward pass; returns what undoes it."""
    runner = llm.engine.runner
    run, number = runner.run, 0

    def wrapped(buffers: Any) -> None:
        nonlocal number
        number += 1
        before(number)
        run(buffers)

    runner.run = wrapped

    def undo() -> None:
        runner.run = run

    return undo


@pytest.mark.parametrize("stream", [True, False])
async def test_a_forward_that_raises_fails_its_step_alone(tiny_model, stream):
    def fail(number):
        if number == 3:
            raise RuntimeError("CUDA error: misaligned address\nsecond line")

    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as session:
        undo = with_steps(llm, fail)
        async with session.post(CHAT, json=body(50, stream=stream)) as response:
            text = await response.text()
            # A stream whose first text had not come yet ends as an answer does.
            begun = response.status == 200
            assert stream or not begun
        error = json.loads(parse_events(text)[-2] if begun else text)["error"]
        assert "misaligned address" in error["message"]
        assert "second line" not in error["message"]
        assert error["type"] == "server_error"
        undo()
        async with session.post(CHAT, json=body(3)) as response:
            assert response.status == 200
        async with session.get("/health") as response:
            assert response.status == 200
        await until_idle(llm)


@pytest.mark.parametrize("stream", [True, False])
async def test_logits_that_are_not_finite_fail_their_request(tiny_model, stream):
    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as session:
        model = llm.engine.runner.model
        logits = model.logits
        model.logits = lambda hidden, index: logits(hidden, index) * float("nan")
        async with session.post(CHAT, json=body(5, stream=stream)) as response:
            assert response.status == 500
            assert "not finite" in (await response.json())["error"]["message"]
        model.logits = logits
        async with session.post(CHAT, json=body(3, stream=stream)) as response:
            assert response.status == 200
            await response.read()
        assert llm.stats()["corrupted_requests"] == 1
        await until_idle(llm)


async def test_a_step_that_hangs_is_noticed(tiny_model):
    released = threading.Event()
    sizes = {"step_timeout": 0.5, "max_num_seqs": 2}
    async with (
        real_server(tiny_model, sizes) as (url, llm),
        aiohttp.ClientSession(url) as session,
    ):
        first = await session.post(CHAT, json=body(180, stream=True))
        await first.content.readline()
        with_steps(llm, lambda number: released.wait())
        others = [
            asyncio.create_task(session.post(CHAT, json=body(180, stream=stream)))
            for stream in (True, False, True, False)
        ]
        try:
            async with asyncio.timeout(PATIENCE):
                text = await first.text()
                answers = await asyncio.gather(*others)
            error = json.loads(parse_events("data: x\n\n" + text.lstrip("\n"))[-2])["error"]
            assert error["code"] == "engine_dead"
            assert "step_timeout" in error["message"]
            for answer in answers:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "engine_dead"
            for path in ("/health", "/ready"):
                async with session.get(path) as response:
                    assert response.status == 503
                    assert await response.json() == {"status": "dead"}
            async with session.post(CHAT, json=body(1)) as response:
                assert response.status == 503
        finally:
            released.set()
            llm._thread.join()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_a_client_that_leaves_frees_its_blocks_at_the_next_step(tiny_model, state, stream):
    """Leaving is noticed while a step runs; the step after it no longer has the request."""
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8} if state != "decoding" else {}
    gate = threading.Event()
    reached = threading.Event()

    def wait(number):
        if number == (1 if state != "decoding" else 5):
            reached.set()
            assert gate.wait(PATIENCE)

    async with real_server(tiny_model, sizes) as (url, llm), aiohttp.ClientSession(url) as session:
        undo = with_steps(llm, wait)
        long = {"messages": [{"role": "user", "content": "x" * 100}]}
        leaver = asyncio.create_task(read(session, body(50, stream=stream) | long))
        await asyncio.to_thread(reached.wait, PATIENCE)
        if state == "queued":
            waiting = asyncio.create_task(read(session, body(50, stream=stream) | long))
            await until(lambda: len(llm._ids) == 2)
            leaver, stays = waiting, leaver
        else:
            stays = None
        cancelled = set(llm._ids)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        await until(lambda: len(llm._ids) == len(cancelled) - 1)
        steps = llm.stats()["num_steps"]
        gate.set()
        if stays is not None:
            assert "[DONE]" in await stays if stream else "choices" in await stays
        await until_idle(llm)
        if stays is None:
            assert llm.stats()["num_steps"] <= steps + 1
        undo()


async def read(session: aiohttp.ClientSession, request: dict[str, Any]) -> str:
    async with session.post(CHAT, json=request) as response:
        return await response.text()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


async def test_the_wait_for_a_first_token_is_limited(tiny_model):
    """One row, held by a long answer: the second request waits in vain, and not for long."""
    sizes = {"max_num_seqs": 1}
    fields = {"max_queue_time": 0.3}
    async with (
        real_server(tiny_model, sizes, **fields) as (url, llm),
        aiohttp.ClientSession(url) as session,
    ):
        undo = with_steps(llm, lambda number: threading.Event().wait(0.02))
        # Whole answers have a first token too.
        holder = asyncio.create_task(read(session, body(120)))
        await until(lambda: llm.stats()["num_requests_running"] == 1)
        async with session.post(CHAT, json=body(5)) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "queue_timeout"
        undo()
        assert json.loads(await holder)["usage"]["completion_tokens"] == 120
        await until_idle(llm)


async def test_a_first_token_whose_text_is_held_back_counts(tiny_model):
    """A stop string that never comes holds all text back; the wait is over all the same."""
    fields = {"max_queue_time": 0.5}
    async with (
        real_server(tiny_model, **fields) as (url, llm),
        aiohttp.ClientSession(url) as session,
    ):
        undo = with_steps(llm, lambda number: threading.Event().wait(0.02))
        request = body(60, stream=True, stop=["\x00" * 500])
        async with session.post(CHAT, json=request) as response:
            check_chat_chunks(await read_events(response))
        undo()
        await until_idle(llm)


async def test_a_client_that_does_not_read_is_paused_and_given_up(tmp_path):
    """More choices than the system's buffers take; the others are served meanwhile."""
    model = tiny.write_tiny_llama(tmp_path / "tiny", max_position_embeddings=4096)
    sizes = {
        "max_model_len": 4096,
        "num_kv_blocks": 4096,
        "block_size": 64,
        "max_num_seqs": 72,
        "max_backlog": 16,
        "stall_limit": 0.5,
    }
    async with real_server(model, sizes) as (url, llm), aiohttp.ClientSession(url) as session:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        raw = json.dumps(body(4000, stream=True, n=64, logprobs=True, top_logprobs=20)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await reader.readexactly(12)
        writer.transport.pause_reading()
        async with session.post(CHAT, json=body(20)) as response:
            assert response.status == 200
        try:
            await until(lambda: llm.stats()["readers_cancelled"] == 64)
            await until(lambda: llm.stats()["kv_blocks_used"] == 0)
            actions = 'channel_policy_actions_total{action="paused",model_name="tiny"}'
            assert await metric(session, actions) >= 64
            assert llm.stats()["deltas_merged"] > 64
            writer.transport.resume_reading()
            received = b""
            while piece := await reader.read(1_000_000):
                received = (received + piece)[-2000:]
                if received.endswith(b"0\r\n\r\n"):
                    break
            assert b'"code":"aborted"' in received
            assert b"[DONE]" in received
        finally:
            writer.close()
        await until_idle(llm)


async def metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(f"miniinfer:{name} "):
                return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def test_a_cache_that_does_not_fit_says_what_would():
    with pytest.raises(KVCacheError) as caught:
        KVCache(2, 2**40, 16, 2, 16, torch.float32, "cpu")
    message = str(caught.value)
    for part in ("would fit", "--num-kv-blocks", "--kv-cache-memory", f"{2**40} blocks"):
        assert part in message


async def test_sigterm_under_load():
    """Thirty-two streams finish, what comes later is refused, and the port is free."""
    async with running_server() as (process, session):
        port = session._base_url.port
        async with aiohttp.ClientSession(session._base_url) as many:
            responses = await asyncio.gather(
                *(many.post("/v1/chat/completions", json=stream_of("slow")) for _ in range(32))
            )
            process.send_signal(signal.SIGTERM)
            for events in await asyncio.gather(*(read_events(r) for r in responses)):
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        code, _, err = await finish(process)
    assert code == 0
    assert "Traceback" not in err
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_second_signal_under_load_ends_at_once():
    async with running_server("--shutdown-timeout", "3600") as (process, session):
        responses = [await session.post(CHAT, json=stream_of("hang")) for _ in range(8)]
        process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:
            async with session.get("/health") as health:
                status = health.status
        process.send_signal(signal.SIGTERM)
        code, _, _ = await finish(process)
        for response in responses:
            response.close()
    assert code == 128 + signal.SIGTERM


async def test_a_server_whose_engine_died_says_so_as_it_ends(tiny_model):
    async with served_process(tiny_model, "--step-timeout", "0.00001", "--log-format", "json") as (
        process,
        session,
    ):
        async with session.post(CHAT, json=body(50)) as response:
            assert response.status == 503
        process.terminate()
        _, err = await process.communicate()
    assert process.returncode == 3
    entries = [json.loads(line) for line in err.decode().splitlines()]
    assert any("step_timeout" in entry.get("message", "") for entry in entries)


async def test_a_certificate_that_is_not_there_is_one_line_and_loads_nothing():
    async with command("serve", "--port", "0", "--tls-cert", "/nowhere/cert.pem") as process:
        code, out, err = await finish(process)
    assert (code, out) == (1, "")
    assert "/nowhere/cert.pem" in err
    assert err.count("\n") == 1


async def test_an_announced_first_token_changes_no_stream(client, engine):
    """A delta without text, as the engine sends for a first token whose text is held back."""
    engine.script = lambda ids, params: [
        FakeDelta(num_output_tokens=1),
        FakeDelta("ab", num_output_tokens=2),
        FakeDelta("", finish_reason="stop", num_output_tokens=2),
    ]
    messages = [{"role": "user", "content": "a"}]
    async with client.post(CHAT, json={"messages": messages, "stream": True}) as response:
        assert check_chat_chunks(await read_events(response)) == {0: "ab"}
    for path in ("/v1/completions", "/generate"):
        async with client.post(path, json={"prompt": "a", "stream": True}) as response:
            events = await read_events(response)
        assert len(events) == 2
