"""The forward pass's operations between the matrix products, in torch.

Faster ones may take their place: `LlamaModel` takes any object with these methods.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["LayerOps", "TorchOps"]


class LayerOps(Protocol):
    """What a layer does beside matrix products and attention; T tokens, H the hidden size."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019) over the last dimension: [T, H], weight [H]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of x + residual, x + residual). May overwrite both arguments."""

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of each head: heads [T, N, D], weight [N, D]."""

    def prepare_rotary(self, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Any:
        """What `rotary` needs for this step: `table` float32 [P, D], `positions` int32 [T]."""

    def rotary(self, heads: Tensor, prepared: Any) -> Tensor:
        """The rotated heads: [T, N, D] to [T, N, D]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of the columns, times the second half: [T, 2 I] to [T, I]."""


class TorchOps:
    """`LayerOps` in plain torch, for any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `LayerOps`."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `LayerOps`."""
        residual = residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, eps), residual

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `LayerOps`."""
        return functional.rms_norm(heads, weight.shape[-1:], None, eps).mul_(weight)

    def prepare_rotary(
        self, table: Tensor, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `LayerOps`. Cosines and signed sines, [T, 1, D] each."""
        cosines, sines = table.index_select(0, positions).to(dtype)[:, None].chunk(2, dim=-1)
        return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)

    def rotary(self, heads: Tensor, prepared: tuple[Tensor, Tensor]) -> Tensor:
        """See `LayerOps`. The halves (a, b) become (a cos - b sin, b cos + a sin)."""
        cosines, sines = prepared
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return (heads * cosines).addcmul_(swapped, sines)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
