"""Whether an operation runs as a Triton kernel, and checks that all operations share."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
"""The one 8-bit type of a cache: 4 bits of exponent, 3 of mantissa, no infinity, at most 448."""


def use_triton(tensor: Tensor) -> bool:
    """True for a tensor on a GPU, and for any tensor where Triton's interpreter is switched on.

    False where Triton is not installed, as on machines that it is not made for.
    """
    wanted = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return wanted and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError naming the tensor unless it has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}")


def check_dense(name: str, tensor: Tensor, dims: int) -> None:
    """ValueError naming the tensor unless its last `dims` dimensions lie densely in memory."""
    expected = 1
    for size, stride in zip(tensor.shape[-dims:][::-1], tensor.stride()[-dims:][::-1], strict=True):
        if size > 1 and stride != expected:
            raise ValueError(
                f"the last {dims} dimensions of {name} must be contiguous; got strides "
                f"{tensor.stride()} for shape {tuple(tensor.shape)}"
            )
        expected *= size


def check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    """ValueError unless a scale is float32 [1] or [Hkv] for a cache of 8 bits, [.., .., Hkv, D].

    Caches of other types have none: None is right for both.
    """
    if scale is None:
        return
    if cache.dtype != FP8:
        raise ValueError(f"{name} is for a cache of {FP8}; this one is {cache.dtype}")
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((1,), (cache.shape[2],)):
        raise ValueError(
            f"{name} must be float32 of shape (1,) or ({cache.shape[2]},); got {scale.dtype} of "
            f"shape {tuple(scale.shape)}"
        )


def check_cache_types(key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype) -> None:
    """ValueError unless both caches have `dtype`, or both are of 8 bits."""
    types = (key_cache.dtype, value_cache.dtype)
    if types not in ((dtype, dtype), (FP8, FP8)):
        raise ValueError(
            f"key_cache and value_cache must be both {dtype} or both {FP8}; got {types[0]} and "
            f"{types[1]}"
        )
