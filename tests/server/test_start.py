"""The real server's start: what it answers while it loads, and what it does not import."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

import miniinfer

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(miniinfer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ),
}

# Each takes between a tenth of a second and several, and none is of use to a server's start.
UNWANTED = ("transformers", "huggingface_hub", "gguf", "jinja2", "torch._inductor")


def run_python(code, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_health_is_loading_and_then_ok(builtin_gguf):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "miniinfer.cli", "serve", str(builtin_gguf)),
        *("--port", str(port), "--num-kv-blocks", "64", "--max-model-len", "512"),
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    answers = []
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            while not answers or answers[-1][0] != 200:
                assert process.returncode is None
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get("/health") as response:
                        answers.append((response.status, await response.json()))
                await asyncio.sleep(0.02)
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert answers[0] == (503, {"status": "loading"})
    assert set(map(str, answers[:-1])) == {str(answers[0])}
    assert answers[-1] == (200, {"status": "ok"})


@pytest.mark.timeout(300)
def test_start_imports_nothing_it_does_not_need(builtin_gguf):
    code = """
import asyncio, sys
import miniinfer.cli, miniinfer.server.run
assert "torch" not in sys.modules, "the server starts before torch is there"
from miniinfer import AsyncLLM, EngineArgs
llm = AsyncLLM(EngineArgs(model=sys.argv[1], num_kv_blocks=64, max_model_len=512))
asyncio.run(llm.close())
print(*sys.modules)
"""
    modules = run_python(code, str(builtin_gguf)).split()
    assert "torch" in modules
    assert not [name for name in UNWANTED if name in modules]


def test_weights_are_read_without_torch(builtin_gguf):
    code = """
import sys
from miniinfer.model.host_weights import read_host_weights
host = read_host_weights(sys.argv[1])
assert all(slot.target.ctypes.data % 64 == 0 for name, slot in host.weights.slots().items())
print("torch" in sys.modules)
"""
    assert run_python(code, str(builtin_gguf)) == "False\n"
