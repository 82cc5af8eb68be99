"""The Triton kernel of `silu_mul`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._launch import tile_of_row


def launch(gate_up: Tensor, output: Tensor) -> None:
    """Run the kernel: one program for each row and `TILE` columns."""
    rows, width = output.shape
    if rows == 0 or width == 0:
        return
    tile = tile_of_row(width)
    grid = (rows, triton.cdiv(width, tile))
    silu_mul_kernel[grid](gate_up, output, gate_up.stride(0), width, TILE=tile)


@triton.jit
def silu_mul_kernel(
    gate_up,  # [T, 2 * width]
    output,  # [T, width]
    stride,
    width,
    TILE: tl.constexpr,
):
    """`TILE` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = column < width
    dtype = output.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(output + row * width + column, (activated * up).to(dtype), mask=inside)
