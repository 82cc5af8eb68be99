"""The Llama family: configuration, weights, the paged cache and the forward pass."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import ForwardBatch
    from .config import SUPPORTED_ARCHITECTURES, ModelConfig, RopeConfig
    from .errors import ModelLoadError
    from .kv_cache import KVCache, KVCacheError, bytes_per_block
    from .llama import LlamaModel
    from .loader import load_model
    from .read_config import read_model_config

_HOMES = {
    "SUPPORTED_ARCHITECTURES": "config",
    "ForwardBatch": "batch",
    "KVCache": "kv_cache",
    "KVCacheError": "kv_cache",
    "LlamaModel": "llama",
    "ModelConfig": "config",
    "ModelLoadError": "errors",
    "RopeConfig": "config",
    "bytes_per_block": "kv_cache",
    "load_model": "loader",
    "read_model_config": "read_config",
}

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "ForwardBatch",
    "KVCache",
    "KVCacheError",
    "LlamaModel",
    "ModelConfig",
    "ModelLoadError",
    "RopeConfig",
    "bytes_per_block",
    "load_model",
    "read_model_config",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that weights can be read while torch is being imported.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
