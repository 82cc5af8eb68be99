"""The examples without a server, on a real engine."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {
        "async_generate",
        "engine_step",
        "offline_generate",
        "openai_client",
        "openai_sdk_stream",
    }
    for name in names:
        assert load(name).__doc__


def test_offline_generate(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("offline_generate")
    assert module.main([str(tiny_model), "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    for prompt in (*module.PROMPTS, "Say hello."):
        assert f"{prompt!r} -> " in out


def test_async_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It leaves an answer of a thousand tokens after five: the context must have that much room.
    model = tiny.write_tiny_llama(tmp_path / "model", max_position_embeddings=2048)
    module = load("async_generate")
    assert module.main([str(model), "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    for prompt in module.PROMPTS:
        assert f"{prompt!r} -> " in out
    assert "left a long answer after" in out


def test_engine_step(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("engine_step").main([str(tiny_model), "--max-tokens", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = {line.split()[2]: line.rpartition(" ")[2] for line in lines if line.endswith(">")}
    assert ends == {"paris": "<max_tokens>", "aborted": "<cancelled>", "late": "<max_tokens>"}
