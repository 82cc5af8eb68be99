"""The Llama family: configuration, weights, the paged cache and the forward pass."""

from .batch import ForwardBatch
from .config import SUPPORTED_ARCHITECTURES, ModelConfig, RopeConfig
from .errors import ModelLoadError
from .kv_cache import KVCache, KVCacheError, bytes_per_block
from .llama import LlamaModel
from .loader import load_model, read_model_config

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
