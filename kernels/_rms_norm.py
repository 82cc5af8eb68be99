"""The Triton kernel of `rms_norm`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._launch import power_of_2, warps_of_row


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    total: Tensor | None = None,
) -> None:
    """Run the kernel: one program for each row, which it holds in registers.

    `x` is [R, H] with `weight` [H], or heads [T, N, D] with `weight` [N, D]; in the latter only the
    first dimension is strided.
    """
    width = x.shape[-1]
    if x.numel() == 0:
        return
    rms_norm_kernel[(x.numel() // width,)](
        x,
        x if residual is None else residual,
        weight,
        normed,
        normed if total is None else total,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        width,
        1 if x.dim() == 2 else x.shape[1],
        eps,
        HAS_RESIDUAL=residual is not None,
        WIDTH=power_of_2(width),
        num_warps=warps_of_row(width),
    )


@triton.jit
def rms_norm_kernel(
    x,  # [R, width], or [R / group, group, width]
    residual,  # [R, width]
    weight,  # [group, width]
    normed,  # [R, width]
    total,  # [R, width]
    x_stride,
    residual_stride,
    width,
    group,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The norm of one row; `group` is 1 where all rows share a weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)  # [WIDTH]
    inside = column < width
    dtype = normed.dtype.element_ty
    head = row % group
    values = tl.load(
        x + row // group * x_stride + head * width + column, mask=inside, other=0.0
    ).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (values + added.to(tl.float32)).to(dtype)
        tl.store(total + row * width + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean_square = tl.sum(values * values, axis=0) / width
    scaled = (values * (1.0 / tl.sqrt(mean_square + eps))).to(dtype).to(tl.float32)
    factor = (
        tl.load(weight + head * width + column, mask=inside, other=0.0).to(dtype).to(tl.float32)
    )
    tl.store(normed + row * width + column, (scaled * factor).to(dtype), mask=inside)
