"""Root-mean-square normalisation, alone or fused with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import check_dense, check_shape, use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` / sqrt(mean(x²) + eps) * weight over the last dimension, in x's dtype: [R, H].

    `x` is [R, H] with dense rows, `weight` [H]. As in transformers the norm is taken in float32
    and rounded to x's dtype before it is multiplied (Zhang and Sennrich, 2019).
    """
    _check(x, weight)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps)
    from ._rms_norm import launch

    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(x, None, weight, eps, normed)
    return normed


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x` + `residual`, and that sum, each [R, H] in x's dtype.

    All of `x` and `residual` is [R, H] with dense rows. The sum is rounded to x's dtype first.
    """
    _check(x, weight)
    check_shape("residual", residual, tuple(x.shape))
    check_dense("residual", residual, 1)
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    from ._rms_norm import launch

    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(normed)
    launch(x, residual, weight, eps, normed, total)
    return normed, total


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of every head by itself, [T, N, D], dense.

    `heads` is [T, N, D], of which only the first dimension may be strided, `weight` dense [N, D].
    """
    if heads.dim() != 3:
        raise ValueError(f"heads must have shape [T, N, D]; got {tuple(heads.shape)}")
    check_dense("heads", heads, 2)
    check_shape("weight", weight, tuple(heads.shape[1:]))
    check_dense("weight", weight, 2)
    if not use_triton(heads):
        return rms_norm_reference(heads, weight, eps)
    from ._rms_norm import launch

    normed = torch.empty_like(heads, memory_format=torch.contiguous_format)
    launch(heads, None, weight, eps, normed)
    return normed


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must have shape [R, H]; got {tuple(x.shape)}")
    check_dense("x", x, 1)
    check_shape("weight", weight, (x.shape[1],))
    check_dense("weight", weight, 1)
