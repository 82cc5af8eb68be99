"""The server over a real engine: disconnects, death, signals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import miniinfer

from .real import PATIENCE, real_server, until_idle
from .sse_client import check_chat_chunks, parse_events, read_events

CHAT = "/v1/chat/completions"


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


async def metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(f"miniinfer:{name}{{"):
                return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


async def test_one_streamed_chat(tiny_model: Path) -> None:
    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as session:
        async with session.post(CHAT, json=body(10, stream=True)) as response:
            events = await read_events(response)
        text = check_chat_chunks(events)[0]
        async with session.post(CHAT, json=body(10)) as response:
            whole = await response.json()
        assert whole["choices"][0]["message"]["content"] == text
        assert await metric(session, "num_requests_running") == 0
        assert await metric(session, "kv_cache_usage_perc") == 0
        assert await metric(session, "generation_tokens_total") == 20
        await until_idle(llm)


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave(tiny_model: Path, stream: bool) -> None:
    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as session:
        for _ in range(3):
            tasks = [
                asyncio.create_task(read_all(session, body(180, stream=stream, n=2)))
                for _ in range(4)
            ]
            async with asyncio.timeout(PATIENCE):
                while llm.stats()["num_requests_running"] < 4:
                    await asyncio.sleep(0.002)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(llm)
        assert llm.stats()["finished_abort"] > 0
        assert await metric(session, "num_requests_running") == 0
        async with session.post(CHAT, json=body(3)) as response:
            assert response.status == 200


async def read_all(session: aiohttp.ClientSession, request: dict[str, Any]) -> str:
    async with session.post(CHAT, json=request) as response:
        return await response.text()


async def test_the_engine_dies_under_its_clients(tiny_model: Path) -> None:
    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as session:
        response = await session.post(CHAT, json=body(180, stream=True))
        await response.content.readline()
        whole = asyncio.create_task(session.post(CHAT, json=body(180)))
        async with asyncio.timeout(PATIENCE):
            while llm.stats()["num_requests"] < 2:
                await asyncio.sleep(0.002)

        def fail(buffers: Any) -> None:
            llm.engine._steps._failures = 2
            raise RuntimeError("the device is gone")

        llm.engine.runner.run = fail  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            text = await response.text()
            answer = await whole
        events = parse_events("data: x\n\n" + text.lstrip("\n"))
        assert events[-1] == "[DONE]"
        assert "the device is gone" in json.loads(events[-2])["error"]["message"]
        assert not any('"finish_reason":"' in event for event in events)
        assert answer.status in (500, 503)
        assert "the device is gone" in (await answer.json())["error"]["message"]
        async with session.get("/health") as health:
            assert health.status == 503
        async with session.post(CHAT, json=body(1)) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "engine_dead"
        await until_idle(llm)


async def test_example_clients(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with real_server(tiny_model) as (url, llm):
        client = load_example("openai_client")
        arguments = ["hi", "--url", url, "--max-tokens", "8"]
        assert await asyncio.to_thread(client.main, arguments) == 0
        assert "from tiny" in capsys.readouterr().err
        sdk = load_example("openai_sdk_stream")
        assert await asyncio.to_thread(sdk.main, ["--url", url, "--max-tokens", "4"]) == 0
        out = capsys.readouterr().out
        for question in sdk.QUESTIONS:
            assert question in out
        await until_idle(llm)


def load_example(name: str) -> Any:
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.asynccontextmanager
async def served_process(model: Path, *arguments: str) -> Any:
    """The command line's server as a process of its own; yields it and a session to it."""
    package = str(Path(miniinfer.__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "miniinfer.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--num-kv-blocks",
        "64",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": package},
    )
    try:
        url = None
        while url is None:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            if not line:
                _, err = await process.communicate()
                raise AssertionError(err.decode())
            if line.startswith("listens"):
                url = line.split()[1]
        async with aiohttp.ClientSession(url) as session:
            yield process, session
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_sigterm_lets_a_stream_finish(tiny_model: Path) -> None:
    async with served_process(tiny_model) as (process, session):
        response = await session.post(CHAT, json=body(200, stream=True))
        first = await response.content.readline()
        process.terminate()
        text = first.decode() + await response.text()
        events = parse_events(text)
        assert events[-1] == "[DONE]"
        check_chat_chunks([json.loads(event) for event in events[:-1]])
        assert '"finish_reason":"length"' in events[-2]
        _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "Traceback" not in err.decode()


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 10**30])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_priority_out_of_range(tiny_model: Path, priority: int, stream: bool) -> None:
    body = {"prompt": "a", "priority": priority, "stream": stream}
    async with real_server(tiny_model) as (url, llm), aiohttp.ClientSession(url) as client:
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["param"] == "priority"
        assert str(priority) in error["message"]
        await until_idle(llm)
