"""What several test files need: real tokenizers, the built-in model, small engines."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before anything imports transformers or huggingface_hub: no test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Set before anything imports torch: its threads must not spin while others have the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

TOKENIZERS = Path(__file__).parent.parent / ".venv" / "tokenizers"


@pytest.fixture(scope="session")
def real_tokenizers() -> dict[str, Path]:
    """Folders with a tokenizer.json and a tokenizer_config.json, by name."""
    folder = Path(os.environ.get("MINIINFER_TOKENIZERS", TOKENIZERS))
    found = {path.name: path for path in sorted(folder.glob("*")) if path.is_dir()}
    assert found, f"no tokenizers in {folder}; `make test` fetches them"
    return found


@pytest.fixture(scope="session")
def builtin_gguf() -> Path:
    """The built-in model's file."""
    from miniinfer.fetch import ensure_builtin

    return ensure_builtin(progress=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with a byte-level tokenizer; read it, do not write to it."""
    import tiny

    return tiny.write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _no_leftover_threads() -> Iterator[None]:
    """An engine that a test forgot would slow down, or break, the tests after it."""
    import threading

    before = set(threading.enumerate())
    yield
    leftover = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name == "miniinfer-engine" and thread.is_alive()
    ]
    assert not leftover, "an AsyncLLM was not closed"
