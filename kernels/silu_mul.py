"""The gated activation of the Llama family's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import check_dense, use_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, I], of `gate_up`, [T, 2 * I] with dense rows: gate first, then up.

    silu is taken in float32 and rounded to the dtype before the product (Shazeer, 2020).
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have shape [T, 2 * I]; got {tuple(gate_up.shape)}")
    check_dense("gate_up", gate_up, 1)
    if not use_triton(gate_up):
        return silu_mul_reference(gate_up)
    from ._silu_mul import launch

    output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    launch(gate_up, output)
    return output


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
