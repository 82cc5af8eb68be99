"""The Triton kernel of `silu_mul`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def launch(gate_up: Tensor, output: Tensor) -> None:
    """Run the kernel: one program for each row and `_TILE` columns."""
    rows, width = output.shape
    if rows == 0 or width == 0:
        return
    tile = min(_TILE, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, tile))
    _silu_mul_kernel[grid](gate_up, output, gate_up.stride(0), width, TILE=tile)


@triton.jit
def _silu_mul_kernel(gate_up, output, stride, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    dtype = output.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(output + row * width + column, (activated * up).to(dtype), mask=inside)
