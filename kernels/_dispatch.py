"""Whether an operation runs as a Triton kernel, and checks that all operations share."""

from __future__ import annotations

import os

from torch import Tensor


def use_triton(tensor: Tensor) -> bool:
    """True for a tensor on a GPU, and for any tensor where Triton's interpreter is switched on."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


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
