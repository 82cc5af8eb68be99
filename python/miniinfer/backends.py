"""Which attention, layer operations and sampler an engine runs on."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .attention import AttentionBackend, TorchAttention
from .attention_flash import FLASH_BLOCK
from .cpu.attention import CpuAttention
from .cpu.model import CpuLlamaModel
from .cpu.packing import FP8_NAMES, Packing, kernel_obstacle
from .model.kv_cache import KVCache
from .model.llama import LlamaModel
from .sampling import SampleOutput, SamplingBatch
from .sampling import sample as sample_in_torch

if TYPE_CHECKING:
    from .config import EngineArgs

__all__ = ["Backend", "attach_attention", "backend_of", "choose_backend"]

Sampler: TypeAlias = Callable[[Tensor, SamplingBatch, int], SampleOutput]
"""From float32 logits [N, V], parameters and the vocabulary's size to tokens."""

_PACKAGES = {"flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
"""What the user installs for a backend that is not ours."""
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Backend:
    """What an engine runs on, and why: `cpu`, `torch`, `triton`, `flash_attn` or `flashinfer`."""

    name: str
    reason: str

    @property
    def has_kernels(self) -> bool:
        """Whether layer operations and sampling run as Triton kernels, too."""
        return self.name == "triton" or (self.name in _PACKAGES and _is_installed("triton"))

    @property
    def sample(self) -> Sampler:
        """Chooses the tokens of a step."""
        if not self.has_kernels:
            return sample_in_torch
        from .kernels import sample

        return sample

    def attach(self, model: LlamaModel, cache: KVCache) -> None:
        """Give a model its attention, over `cache`, and its layer operations."""
        if isinstance(model, CpuLlamaModel):
            model.attention = CpuAttention(cache)
            return
        if self.has_kernels:
            from .model.triton_ops import TritonOps

            model.ops = TritonOps()
        model.attention = self._attention(model, cache)

    def _attention(self, model: LlamaModel, cache: KVCache) -> AttentionBackend[Any]:
        if self.name == "triton":
            from .attention_triton import TritonAttention

            return TritonAttention(cache)
        if self.name == "flash_attn":
            from .attention_flash import FlashAttention

            return FlashAttention(cache)
        if self.name == "flashinfer":
            from .attention_flashinfer import FlashInferAttention

            return FlashInferAttention(cache, model.config.num_heads, model.dtype)
        return TorchAttention(cache, model.dtype)

    def kv_dtype(self, args: EngineArgs, model: LlamaModel) -> torch.dtype:
        """The type of the cache; ValueError where the backend cannot have the one asked for."""
        name = args.kv_cache_dtype
        own = str(model.dtype).removeprefix("torch.")
        if self.name == "flash_attn" and model.dtype not in _HALVES:
            raise ValueError(f"attention_backend flash_attn takes float16 or bfloat16, not {own}")
        if name == "auto":
            if getattr(model, "is_quantized", False):
                return torch.float16
            # The kernels for CPUs say float32, in which they compute between such weights.
            return torch.bfloat16 if args.dtype == "bfloat16" else model.dtype
        is_fp8 = name in FP8_NAMES
        dtype: torch.dtype = torch.float8_e4m3fn if is_fp8 else getattr(torch, name)
        takes_fp8 = self.name != "flash_attn"
        if self.name in ("cpu", "torch") or dtype == model.dtype or (is_fp8 and takes_fp8):
            return dtype
        raise ValueError(
            f"kv_cache_dtype {name} cannot be had with attention_backend {self.name} and weights "
            f"of {own}: take auto{' or fp8' if takes_fp8 else ''}"
        )


def choose_backend(args: EngineArgs, device: torch.device, packing: Packing | None) -> Backend:
    """The backend that the settings ask for, or else the best that there is.

    `packing`: how the weights are packed for the kernels for CPUs; None if they do not run. Raises
    `ValueError` for a backend that cannot be had, saying what is missing.
    """
    name = args.attention_backend
    if packing is not None:
        return Backend("cpu", "asked for" if name == "cpu" else "the device is a CPU")
    if name != "auto":
        obstacle = _obstacle(args, device)
        if obstacle is not None:
            raise ValueError(f"attention_backend {name} cannot be had: {obstacle}")
        return Backend(name, "asked for")
    if device.type == "cpu":
        return Backend(
            "torch", f"the kernels for CPUs exclude {kernel_obstacle(args, on_cpu=True)}"
        )
    if device.type != "cuda":
        return Backend("torch", f"the kernels do not run on {device}")
    if not _is_installed("triton"):
        return Backend("torch", f"{device} could run triton, but it is not installed")
    return Backend("triton", f"{device} runs it and it is installed")


def backend_of(model: LlamaModel) -> Backend:
    """The backend that needs nothing but torch and this package."""
    name = "cpu" if isinstance(model, CpuLlamaModel) else "torch"
    return Backend(name, "nothing else was chosen")


def attach_attention(model: LlamaModel, cache: KVCache) -> None:
    """Give a model the attention of `backend_of`, over `cache`."""
    backend_of(model).attach(model, cache)


def _obstacle(args: EngineArgs, device: torch.device) -> str | None:
    """What keeps the named backend from running, or None."""
    name = args.attention_backend
    if name == "torch":
        return None
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"it needs a GPU (device cuda), and the device is {device}"
    package = _PACKAGES.get(name, name)
    if not _is_installed(name):
        return f"the package {package} is not installed (pip install {package})"
    if name == "flash_attn" and args.block_size % FLASH_BLOCK:
        return f"block_size must be a multiple of {FLASH_BLOCK} for it, got {args.block_size}"
    return None


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
