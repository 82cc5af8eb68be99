"""The server with its engines in processes of their own, as a program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import miniinfer
from miniinfer import EngineArgs
from miniinfer.remote_llm import RemoteLLM

from .real import PATIENCE, SIZES, serving
from .sse_client import check_chat_chunks, parse_events, read_events

CHAT = "/v1/chat/completions"


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    fixed = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return {"messages": messages, **fixed, **fields}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2 * PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int, module: str) -> list[int]:
    """Processes of a module that another process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and module in (folder / "cmdline").read_text().split("\0"):
                found.append(int(folder.name))
    return sorted(found)


async def test_answers_leavers_and_death(tiny_model: Path) -> None:
    args = EngineArgs(model=str(tiny_model), threads=1, **SIZES)
    llm = await asyncio.to_thread(RemoteLLM.from_args, args)
    async with serving(llm) as url, aiohttp.ClientSession(url) as session:
        async with session.post(CHAT, json=body(10, stream=True)) as response:
            text = check_chat_chunks(await read_events(response))[0]
        async with session.post(CHAT, json=body(10)) as response:
            whole = await response.json()
        assert whole["choices"][0]["message"]["content"] == text
        await until(lambda: llm.stats()["generation_tokens"] == 20)
        async with session.get("/metrics") as response:
            assert 'miniinfer:generation_tokens_total{model_name="tiny"} 20.0' in (
                await response.text()
            )

        leavers = [
            asyncio.create_task(read_all(session, body(180, stream=i % 2 == 0, n=2)))
            for i in range(30)
        ]
        await until(lambda: llm.stats()["num_requests_running"] > 4)
        for leaver in leavers:
            leaver.cancel()
        await asyncio.gather(*leavers, return_exceptions=True)
        await until(lambda: llm.stats()["kv_blocks_used"] == 0)
        await llm.check()
        assert llm.stats()["finished_abort"] > 0

        # Many choices, so that the engine is far from done when it is killed.
        response = await session.post(CHAT, json=body(180, stream=True, n=12))
        await response.content.readline()
        waiting = asyncio.create_task(session.post(CHAT, json=body(180)))
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        # A second is promised; the rest is for a machine with other work.
        async with asyncio.timeout(10):
            events = parse_events("data: x\n\n" + (await response.text()).lstrip("\n"))
            answer = await waiting
        assert events[-1] == "[DONE]"
        assert "SIGKILL" in json.loads(events[-2])["error"]["message"]
        assert answer.status in (500, 503)
        async with session.get("/health") as health:
            assert health.status == 503
        async with session.post(CHAT, json=body(1)) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "engine_dead"


async def read_all(session: aiohttp.ClientSession, request: dict[str, Any]) -> str:
    async with session.post(CHAT, json=request) as response:
        return await response.text()


@contextlib.asynccontextmanager
async def served(
    model: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, aiohttp.ClientSession]]:
    """`miniinfer serve`, ready."""
    package = Path(miniinfer.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "miniinfer.cli", "serve", str(model), "--port", "0"),
        *("--num-kv-blocks", "256", "--block-size", "4", "--max-model-len", "200", *flags),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    try:
        url = ""
        async with asyncio.timeout(4 * PATIENCE):
            while not url:
                line = (await process.stdout.readline()).decode()
                assert line, "it has ended"
                if line.startswith("listens"):
                    url = line.split()[1]
        # A connection of its own for each request, so that every process gets some.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            yield process, session
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        async with asyncio.timeout(PATIENCE):
            # Its end comes with that of the last process that it was handed down to.
            await process.stdout.read()


async def test_sigterm_under_load_with_an_engine_apart(tiny_model: Path) -> None:
    async with served(tiny_model, "--layout", "two") as (process, session):
        [engine] = children(process.pid, "miniinfer.engine_process")
        streams = [asyncio.create_task(read_all(session, body(150, stream=True))) for _ in range(8)]
        async with session.post(CHAT, json=body(1)) as response:
            assert response.status == 200
        process.terminate()
        async with asyncio.timeout(2 * PATIENCE):
            texts = await asyncio.gather(*streams)
            assert await process.wait() == 0
        for text in texts:
            assert text.rstrip().endswith("[DONE]")
            assert '"finish_reason":"length"' in text
        await until(lambda: not is_running(engine))


@pytest.mark.timeout(300)
async def test_several_of_each_lose_some_and_go_on(tiny_model: Path) -> None:
    flags = ("--api-processes", "2", "--engines", "2", "--restart-engine")
    async with served(tiny_model, *flags) as (process, session):
        servers = children(process.pid, "miniinfer.api_process")
        engines = children(process.pid, "miniinfer.engine_process")
        assert (len(servers), len(engines)) == (2, 2)

        async def ask() -> str:
            async with session.post(CHAT, json=body(8)) as response:
                assert response.status == 200
                return str((await response.json())["choices"][0]["message"]["content"])

        text = await ask()
        assert {await ask() for _ in range(10)} == {text}

        async def counters() -> dict[str, Any]:
            async with session.get("/healthz") as response:
                return dict((await response.json())["stats"])

        async def settled() -> None:
            """No engine has requests, whoever asked for them, and none holds blocks."""
            async with asyncio.timeout(2 * PATIENCE):
                while True:
                    found = await counters()
                    if not found["num_requests_running"] and not found["kv_blocks_used"]:
                        return
                    await asyncio.sleep(0.05)

        # A server process dies under its clients: the engines end their requests.
        streams = [
            asyncio.create_task(read_all(session, body(190, stream=True, n=4))) for _ in range(8)
        ]
        await asyncio.sleep(0.2)
        os.kill(servers[0], signal.SIGKILL)
        ends = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(end, aiohttp.ClientError) or "[DONE]" in end for end in ends)
        await until(lambda: len(children(process.pid, "miniinfer.api_process")) == 2)
        await settled()

        # An engine dies: the other takes the requests, and a new one comes.
        os.kill(engines[0], signal.SIGKILL)
        await until(lambda: not is_running(engines[0]))
        await until(lambda: len(children(process.pid, "miniinfer.engine_process")) == 2)
        answers = []
        async with asyncio.timeout(4 * PATIENCE):
            while answers[-10:] != [text] * 10:
                with contextlib.suppress(aiohttp.ClientError, AssertionError):
                    answers.append(await ask())
        await settled()

        pids = [
            *children(process.pid, "miniinfer.api_process"),
            *children(process.pid, "miniinfer.engine_process"),
        ]
        process.kill()
        await process.wait()
        await until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.timeout(300)
async def test_an_engine_that_stops_responding_is_replaced(tiny_model: Path) -> None:
    flags = ("--api-processes", "2", "--restart-engine", "--step-timeout", "3")
    async with served(tiny_model, *flags) as (process, session):
        [engine] = children(process.pid, "miniinfer.engine_process")
        os.kill(engine, signal.SIGSTOP)
        async with asyncio.timeout(2 * PATIENCE):
            texts = await asyncio.gather(*(read_all(session, body(8)) for _ in range(6)))
        for text in texts:
            assert "no sign of life" in json.loads(text)["error"]["message"]
        await until(lambda: not is_running(engine))
        await until(lambda: len(children(process.pid, "miniinfer.engine_process")) == 1)
        answers: list[str] = []
        async with asyncio.timeout(4 * PATIENCE):
            # Each server process must have found the new one.
            while len(answers) < 6:
                text = await read_all(session, body(8))
                answers = [*answers, text] if '"finish_reason":"length"' in text else []
                await asyncio.sleep(0.05)


async def test_sigterm_ends_several_of_each(tiny_model: Path) -> None:
    async with served(tiny_model, "--api-processes", "2") as (process, session):
        pids = [
            *children(process.pid, "miniinfer.api_process"),
            *children(process.pid, "miniinfer.engine_process"),
        ]
        assert len(pids) == 3
        streams = [asyncio.create_task(read_all(session, body(150, stream=True))) for _ in range(6)]
        await asyncio.sleep(0.3)
        process.terminate()
        async with asyncio.timeout(2 * PATIENCE):
            texts = await asyncio.gather(*streams, return_exceptions=True)
            assert await process.wait() == 0
        for text in texts:
            assert isinstance(text, aiohttp.ClientError) or "[DONE]" in text
        await until(lambda: not any(is_running(pid) for pid in pids))


async def test_a_model_that_cannot_be_loaded_ends_all(tiny_model: Path) -> None:
    package = Path(miniinfer.__file__).parents[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "miniinfer.cli", "serve", str(tiny_model), "--port", "0"),
        *("--max-model-len", "9999", "--api-processes", "2"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    async with asyncio.timeout(4 * PATIENCE):
        _, error = await process.communicate()
    assert process.returncode == 1
    assert b"--max-model-len must be at most 256" in error
    assert not children(process.pid, "miniinfer.engine_process")
