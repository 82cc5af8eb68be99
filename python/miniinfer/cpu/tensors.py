"""Tensors as the kernels take them: by address, checked before."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["address"]


def address(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> int:
    """Where a tensor lies. Raises `ValueError` unless it has this shape and type, in one piece."""
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous():
        return tensor.data_ptr()
    raise ValueError(
        f"{name} must be {_name(dtype)} {list(shape)} and contiguous, "
        f"got {_name(tensor.dtype)} {list(tensor.shape)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
