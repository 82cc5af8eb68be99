"""The server as a process: start, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

import miniinfer

from .sse_client import parse_events

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"


def stream_of(text):
    return {"messages": [{"role": "user", "content": text}], "stream": True}


@contextlib.asynccontextmanager
async def command(*arguments, stdin=None, **environment):
    """Run the command line over the scripted engine; killed if it still runs at the end."""
    package = str(Path(miniinfer.__file__).parents[1])
    paths = [str(ROOT), package, os.environ.get("PYTHONPATH", "")]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.server.serve_fake",
        *arguments,
        stdin=stdin or asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def running_server(*arguments, **environment):
    """Start a server on a free port and wait for its banner; yields (process, session)."""
    async with command("serve", "--port", "0", *arguments, **environment) as process:
        url = None
        while url is None:
            line = (await process.stdout.readline()).decode()
            assert line, (await process.stderr.read()).decode()
            if line.startswith("listens"):
                url = line.split()[1]
        async with aiohttp.ClientSession(url) as session:
            yield process, session


async def finish(process):
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_an_idle_server(number):
    async with running_server() as (process, session):
        async with session.get("/health") as response:
            assert response.status == 200
        process.send_signal(number)
        code, out, _ = await finish(process)
    assert code == 0
    assert "curl -N" in out


async def test_signal_lets_a_stream_finish_and_refuses_new_work():
    async with running_server() as (process, session):
        port = session._base_url.port
        response = await session.post(CHAT, json=stream_of("slow"))
        await response.content.readline()
        process.terminate()
        refused = None
        while refused != 503:
            # The signal arrives when it arrives: until then the server takes requests.
            try:
                async with session.post("/v1/completions", json={"prompt": "a"}) as again:
                    refused = again.status
            except aiohttp.ClientConnectionError:
                refused = 503
        events = parse_events("data: x\n\n" + (await response.text()).lstrip("\n"))
        assert events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert (await finish(process))[0] == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_stream_that_does_not_finish_gets_an_error():
    async with running_server("--shutdown-timeout", "0.1") as (process, session):
        response = await session.post(CHAT, json=stream_of("hang"))
        await response.content.readline()
        process.terminate()
        text = await response.text()
        assert '"code":"shutting_down"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await finish(process))[0] == 0


async def test_second_signal_ends_at_once():
    async with running_server("--shutdown-timeout", "3600") as (process, session):
        response = await session.post(CHAT, json=stream_of("hang"))
        await response.content.readline()
        process.terminate()
        status = 200
        while status == 200:
            async with session.get("/health") as health:
                status = health.status
        process.terminate()
        assert (await finish(process))[0] == 128 + signal.SIGTERM
        response.close()


async def test_health_answers_while_the_model_loads():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with (
        command("serve", "--port", str(port), FAKE_LOAD_SECONDS="3600") as process,
        aiohttp.ClientSession(url) as session,
    ):
        body = None
        while body is None:
            try:
                async with session.get("/health") as response:
                    body = await response.json()
                    assert response.status == 503
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
        assert body == {"status": "loading"}
        process.terminate()
        assert (await finish(process))[0] == 0


async def test_port_in_use_is_one_line_and_loads_nothing():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with command("serve", "--port", str(port)) as process:
            code, out, err = await finish(process)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err
    assert "in use" in err


async def test_unknown_host():
    async with command("serve", "--host", "host.invalid") as process:
        code, _, err = await finish(process)
    assert code == 1
    assert err.count("\n") == 1
    assert "host.invalid" in err


async def test_failed_load_is_one_line():
    async with command("serve", "--port", "0", FAKE_LOAD_ERROR="no model\nhere") as process:
        code, _, err = await finish(process)
    assert code == 1
    assert err.splitlines()[-1] == "miniinfer: error: no model here"
    assert "Traceback" not in err


async def test_failed_load_shows_its_origin_when_debugging():
    arguments = ("serve", "--port", "0", "--log-level", "debug")
    async with command(*arguments, FAKE_LOAD_ERROR="no model") as process:
        code, _, err = await finish(process)
    assert code == 1
    assert "Traceback" in err


async def test_generate_prints_the_text():
    async with command("generate", "-p", "hello") as process:
        code, out, err = await finish(process)
    assert (code, out) == (0, "you said hello\n"), err


async def test_generate_reads_stdin():
    async with command("generate", "-p", "-", stdin=asyncio.subprocess.PIPE) as process:
        out, _ = await process.communicate(b"from a pipe")
    assert (process.returncode, out) == (0, b"you said from a pipe\n")


async def test_generate_that_fails():
    async with command("generate", "--chat", "-p", "fail") as process:
        code, _, err = await finish(process)
    assert code == 1
    assert err.splitlines()[-1] == "miniinfer: error: it failed"


async def test_chat_over_a_pipe():
    async with command("chat", stdin=asyncio.subprocess.PIPE) as process:
        out, err = await process.communicate(b"hi\n\n/reset\nhey\n/quit\nnever\n")
    assert (process.returncode, out) == (0, b"you said hi\nyou said hey\n"), err


async def test_chat_over_a_pipe_that_fails():
    async with command("chat", stdin=asyncio.subprocess.PIPE) as process:
        _, err = await process.communicate(b"fail\nhey\n")
    assert process.returncode == 1
    assert b"it failed" in err


async def test_interrupt_ends_generate_quietly():
    async with command("generate", "-p", "hang") as process:
        assert await process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        code, _, err = await finish(process)
    assert code == 130
    assert "Traceback" not in err
