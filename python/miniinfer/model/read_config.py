"""A model's configuration, without its weights and without torch."""

from __future__ import annotations

import os
from pathlib import Path

from ..gguf_file import GGUFFile
from .config import ModelConfig
from .errors import ModelLoadError
from .gguf_config import gguf_model_config
from .hf_config import read_hf_config

__all__ = ["read_model_config"]


def read_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of the model at `path`: a directory with config.json, or a GGUF file.

    Raises `ModelLoadError` or `GGUFError`.
    """
    path = Path(path)
    if path.is_dir():
        return read_hf_config(path)
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file or directory")
    return gguf_model_config(GGUFFile(path))
