"""The forward pass's operations between the matrix products, by the kernels for GPUs."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels import add_rms_norm, apply_rotary, head_norm, rms_norm, silu_mul

__all__ = ["TritonOps"]

Rotary: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""The positions, int32 [T], and the table's cosines and sines, float32 [P, D / 2] each."""


class TritonOps:
    """`LayerOps`: one launch for each operation, in float32 inside and rounded once at the end."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `LayerOps`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `LayerOps`."""
        return add_rms_norm(x, residual, weight, eps)

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `LayerOps`."""
        return head_norm(heads, weight, eps)

    def prepare_rotary(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """See `LayerOps`. The kernel looks the positions up itself."""
        cosines, sines = table.chunk(2, dim=-1)
        return positions, cosines, sines

    def rotary(self, heads: Tensor, prepared: Rotary) -> Tensor:
        """See `LayerOps`. In place."""
        apply_rotary(heads, None, *prepared)
        return heads

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        return silu_mul(gate_up)
