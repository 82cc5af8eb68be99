"""Serve and embed large language models: a Rust control plane under a torch forward pass.

    from miniinfer import LLM, SamplingParams

    llm = LLM()  # the built-in SmolLM2-135M-Instruct
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.text)

`AsyncLLM` is the same for an event loop, `LLMEngine` the step loop to drive oneself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .config import EngineArgs
    from .errors import EngineDeadError, RequestError
    from .llm import LLM
    from .llm_engine import LLMEngine
    from .outputs import CompletionOutput, Logprob, RequestOutput
    from .parameters import ParameterError
    from .sampling_params import RequestOutputKind, SamplingParams
    from .streams import Stream
    from .structured import CompiledGrammar, StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "async_llm",
    "CompiledGrammar": "structured",
    "CompletionOutput": "outputs",
    "EngineArgs": "config",
    "EngineDeadError": "errors",
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "Logprob": "outputs",
    "ParameterError": "parameters",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "Stream": "streams",
    "StructuredOutputsParams": "structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompiledGrammar",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "LLMEngine",
    "Logprob",
    "ParameterError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Stream",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import miniinfer` and the command line's help cost nothing.
    from importlib import import_module

    if name == "__version__":
        return import_module("miniinfer._core").__version__
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"miniinfer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
