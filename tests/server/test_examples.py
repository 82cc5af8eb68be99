"""The examples that talk to a server, against one over a scripted engine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from .fake import FakeDelta, FakeEngine, answer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def engine():
    return FakeEngine(max_model_len=200)


async def run_example(name, *arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / name),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_standard_library_client(start, engine):
    engine.script = lambda ids, params: [0.1, *answer(params, ["Par", "ís"])]
    client = await start(engine, keep_alive_interval=0.02)
    code, out, err = await run_example("openai_client.py", "hm?", "--url", str(client.make_url("")))
    assert (code, out) == (0, "París\n"), err
    assert "5 tokens from fake-model" in err


async def test_openai_sdk(start, engine):
    engine.script = lambda ids, params: answer(params, ["said ", bytes(ids).decode()[:4]])
    client = await start(engine)
    url = str(client.make_url("")).rstrip("/")
    code, out, err = await run_example("openai_sdk_stream.py", "--url", url)
    assert code == 0, err
    assert [line.strip() for line in out.splitlines()[1::2]] == [
        "said Name",
        "said What",
        "said Say",
    ]
    assert len(engine.requests) == 3


def load_client():
    spec = importlib.util.spec_from_file_location("openai_client", EXAMPLES / "openai_client.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_client_skips_what_is_not_data():
    lines = [b": keep-alive\n", b"event: x\n", b"\n", b'data: {"a": 1}\r\n', b"data:[DONE]\n"]
    assert list(load_client().events(lines)) == [{"a": 1}]


def test_client_knows_a_cut_stream_and_an_error():
    events = load_client().events
    with pytest.raises(RuntimeError, match="before"):
        list(events([b'data: {"a": 1}\n']))
    with pytest.raises(RuntimeError, match="no memory"):
        list(events([b'data: {"error": {"message": "no memory"}}\n']))


async def test_client_shows_the_servers_error(start, engine):
    engine.script = lambda ids, params: [FakeDelta("", finish_reason="error", error="no memory")]
    client = await start(engine)
    code, _, err = await run_example("openai_client.py", "--url", str(client.make_url("")))
    assert (code, err) == (1, "error: no memory\n")
