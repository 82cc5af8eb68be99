"""Where the peers lie, and which of them are installed."""

from __future__ import annotations

import sys
from pathlib import Path

from miniinfer.fetch import cache_directory

NAMES = ("vllm", "llama", "transformers")


def home() -> Path:
    """The folder that holds an environment for each peer, and the model in bfloat16."""
    return cache_directory() / "peers"


def plain_model() -> Path:
    """The built-in model, dequantised to bfloat16, as a directory of safetensors."""
    return home() / "model-bfloat16"


def vllm_python() -> Path:
    return home() / "vllm" / "bin" / "python"


def llama_binary(name: str) -> Path:
    """`llama-server` or `llama-bench`."""
    return home() / "llama" / "build" / "bin" / name


def transformers_python() -> Path:
    """It is among the project's own development packages."""
    return Path(sys.executable)


def missing(name: str) -> str | None:
    """Why a peer cannot be measured, or None if it can."""
    hint = f"python benches/peers/install.py {name} installs it"
    if name == "llama":
        absent = not all(llama_binary(each).is_file() for each in ("llama-server", "llama-bench"))
    elif name == "vllm":
        absent = not (home() / "vllm" / "installed").is_file()
    else:
        absent = _has_no_transformers()
    if absent:
        return f"{name} is not installed: {hint}"
    if name != "llama" and not (plain_model() / "model.safetensors").is_file():
        return f"{name} needs the model in bfloat16: {hint}"
    return None


def _has_no_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is None


def preloads() -> tuple[list[Path], list[str]]:
    """Libraries that vLLM's CPU build wants loaded first, and the names of those not found."""
    found, absent = [], []
    openmp = home() / "vllm" / "lib" / "libiomp5.so"
    allocators = [
        path
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
        for name in ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4")
        if (path := Path(folder) / name).exists()
    ]
    for name, paths in (
        ("tcmalloc (Debian's libtcmalloc-minimal4)", allocators),
        ("libiomp5 (intel-openmp)", [openmp] if openmp.exists() else []),
    ):
        if paths:
            found.append(paths[0])
        else:
            absent.append(name)
    return found, absent
