"""Whether the kernels run a model, and how its weights are packed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..config import EngineArgs

__all__ = ["FP8_NAMES", "Packing", "choose_packing", "kernel_obstacle"]

FP8_NAMES = ("fp8", "fp8_e4m3")
"""What `EngineArgs.kv_cache_dtype` calls 8-bit floats."""

Packing = Literal["stored", "float32", "bfloat16", "int8", "int4"]
"""stored: as the file has them; the others convert."""


def choose_packing(args: EngineArgs, *, on_cpu: bool, is_gguf: bool) -> Packing | None:
    """How to pack the weights; None leaves the model to torch.

    Raises `ValueError` where the settings ask for kernels and exclude them.
    """
    quantizes = args.quantization in ("int8", "int4")
    obstacle = kernel_obstacle(args, on_cpu=on_cpu)
    if obstacle is not None:
        if quantizes or args.attention_backend == "cpu" or args.kv_cache_dtype == "int8":
            wish = "quantization " + args.quantization if quantizes else "the kernels for CPUs"
            raise ValueError(f"{wish} cannot be had with {obstacle}")
        return None
    if args.quantization == "int8":
        return "int8"
    if args.quantization == "int4":
        return "int4"
    if args.quantization == "auto" and args.dtype == "auto" and is_gguf:
        return "stored"
    return "bfloat16" if args.dtype == "bfloat16" else "float32"


def kernel_obstacle(args: EngineArgs, *, on_cpu: bool) -> str | None:
    """The setting that excludes the kernels for CPUs, or None."""
    if args.attention_backend not in ("auto", "cpu"):
        return f"attention_backend {args.attention_backend}"
    if not on_cpu:
        return f"device {args.device}"
    if args.tensor_parallel_size > 1:
        return f"tensor_parallel_size {args.tensor_parallel_size}"
    if args.dtype == "float16":
        return "dtype float16"
    if args.kv_cache_dtype in FP8_NAMES:
        return f"kv_cache_dtype {args.kv_cache_dtype}"
    return None
