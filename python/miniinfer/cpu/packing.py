"""Whether the kernels run a model, and how its weights are packed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..config import EngineArgs

__all__ = ["Packing", "choose_packing"]

Packing = Literal["stored", "float32", "bfloat16", "int8", "int4"]
"""stored: as the file has them; the others convert."""


def choose_packing(args: EngineArgs, *, on_cpu: bool, is_gguf: bool) -> Packing | None:
    """How to pack the weights; None leaves the model to torch.

    Raises `ValueError` where the settings ask for kernels and exclude them.
    """
    quantizes = args.quantization in ("int8", "int4")
    obstacle = None
    if args.attention_backend == "torch":
        obstacle = "attention_backend torch"
    elif not on_cpu:
        obstacle = f"device {args.device}"
    elif args.dtype == "float16":
        obstacle = "dtype float16"
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
