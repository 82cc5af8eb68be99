"""Tensor parallelism from outside: commands, torchrun, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

import miniinfer

from .real import PATIENCE
from .test_remote_engine import CHAT, body, children, is_running, served, until

FOLLOWER = "miniinfer.parallel.follower"
FLAGS = ("--device", "cpu", "--attention-backend", "torch", "--threads", "1")

PROMPT = ("-p", "abc", "--temperature", "0", "--max-tokens", "30")
COMMAND = ("-m", "miniinfer.cli")


def environment(**variables: str) -> dict[str, str]:
    package = str(Path(miniinfer.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", **variables}


def generate(model: Path, *launcher: str) -> str:
    """What `miniinfer generate` prints."""
    done = subprocess.run(
        [sys.executable, *launcher, *COMMAND, "generate", str(model), *FLAGS, *PROMPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=8 * PATIENCE,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchrun_starts_the_ranks_of_a_command(tiny_model: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert generate(tiny_model, *launcher) == generate(tiny_model)


@pytest.mark.parametrize("killed", ["server", "rank"])
async def test_an_engine_apart_leaves_no_process_behind(tiny_model: Path, killed: str) -> None:
    flags = (*FLAGS, "--layout", "two", "-tp", "2")
    async with served(tiny_model, *flags) as (process, session):
        async with session.post(CHAT, json=body(9)) as response:
            assert response.status == 200
        [engine] = children(process.pid, "miniinfer.engine_process")
        [follower] = children(engine, FOLLOWER)
        if killed == "server":
            process.kill()
        else:
            os.kill(follower, signal.SIGKILL)
            await until_dead(session, "rank 1 was killed by SIGKILL")
        await until(lambda: not is_running(engine) and not is_running(follower))


@contextlib.contextmanager
def other_rank(model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of the same command, started by somebody who sets torchrun's variables."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "serve", str(model), *FLAGS, "--max-model-len", "200"],
        env=environment(MASTER_PORT=str(port), **variables),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ending", ["killed", "stopped", "other killed"])
async def test_ranks_that_were_launched_end_together(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with other_rank(tiny_model, port) as other:
        async with served(tiny_model, *FLAGS) as (process, session):
            async with session.post(CHAT, json=body(5)) as response:
                assert response.status == 200
            if ending == "other killed":
                os.kill(other.pid, signal.SIGKILL)
                await until_dead(session, "rank 1 has gone")
                return
            process.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGTERM)
            code = await asyncio.to_thread(other.wait, 2 * PATIENCE)
            assert code == (1 if ending == "killed" else 0)
            assert await process.wait() == (-signal.SIGKILL if ending == "killed" else 0)


async def until_dead(session: aiohttp.ClientSession, reason: str) -> None:
    """The server says that its engine is dead, and why."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async with session.get("/health") as health:
                if health.status == 503:
                    break
            await asyncio.sleep(0.02)
    async with session.post(CHAT, json=body(1)) as refused:
        assert refused.status == 503
        assert reason in await refused.text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("-tp", "3"),
            "error: --tensor-parallel-size must divide the model's 4 attention heads, got 3: "
            "1, 2 or 4 would do",
        ),
        (("-tp", "0"), "must be an integer of at least 1, got '0'"),
        (("--tensor-parallel-size", "2000"), "must be from 1 to 1024, got 2000"),
        (("-tp", "2", "--quantization", "int4"), "quantization must be one of auto, none"),
    ],
)
def test_bad_sizes_end_in_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    from miniinfer.cli import main

    command = ["generate", str(tiny_model), "-p", "abc", "--device", "cpu", *flags]
    try:
        code = main(command)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
    assert "tensor" in said[-1]


def test_several_engines_cannot_share_a_launch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from miniinfer.cli import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["serve", str(tiny_model), "--engines", "2"]) == 2
    assert "--engines must be 1 where torchrun" in capsys.readouterr().err
