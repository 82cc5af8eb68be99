"""The exceptions of the package.

ValueError
    RequestError        a request that was refused; names the parameter
    ParameterError      a sampling parameter out of range
    ModelSourceError    a model that cannot be found
    ModelLoadError      a model that cannot be loaded
    GGUFError           a GGUF file that is damaged
    TokenizerError      a tokenizer that cannot be loaded
    ChatTemplateError   messages that the chat template cannot render
RuntimeError
    EngineDeadError     the engine has stopped
    KVCacheError        the KV cache does not fit the memory
    FetchError          the built-in model could not be fetched
    ParallelError       a process of a tensor-parallel engine is gone or out of step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import EngineDeadError, RequestError
    from .chat_template import ChatTemplateError
    from .fetch import FetchError
    from .gguf_file import GGUFError
    from .model.errors import ModelLoadError
    from .model.kv_cache import KVCacheError
    from .parallel.errors import ParallelError
    from .parameters import ParameterError
    from .source import ModelSourceError
    from .tokenizer import TokenizerError

_HOMES = {
    "RequestError": "_core",
    "EngineDeadError": "_core",
    "ParameterError": "parameters",
    "ModelSourceError": "source",
    "ModelLoadError": "model.errors",
    "GGUFError": "gguf_file",
    "TokenizerError": "tokenizer",
    "ChatTemplateError": "chat_template",
    "KVCacheError": "model.kv_cache",
    "FetchError": "fetch",
    "ParallelError": "parallel.errors",
}

__all__ = [
    "ChatTemplateError",
    "EngineDeadError",
    "FetchError",
    "GGUFError",
    "KVCacheError",
    "ModelLoadError",
    "ModelSourceError",
    "ParallelError",
    "ParameterError",
    "RequestError",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    # Each comes from its own module, so that naming one does not import torch for another.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"miniinfer.{_HOMES[name]}"), name)
