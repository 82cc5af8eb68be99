"""The Triton kernel of `rotary`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def launch(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Run the kernel: one program for each token, over a tile of all its heads."""
    tokens, count, head_dim = heads.shape
    half = cos.shape[1]
    if heads.numel() == 0 or half == 0:
        return
    _rotary_kernel[(tokens,)](
        heads,
        positions,
        cos,
        sin,
        heads.stride(0),
        positions.stride(0),
        count,
        head_dim,
        half,
        HEADS=triton.next_power_of_2(count),
        HALF=triton.next_power_of_2(half),
    )


@triton.jit
def _rotary_kernel(
    heads,
    positions,
    cos,
    sin,
    token_stride,
    position_stride,
    count,
    head_dim,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    element = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    cosine = tl.load(cos + position * half + element, mask=element < half, other=0.0)
    sine = tl.load(sin + position * half + element, mask=element < half, other=0.0)
    inside = (head < count) & (element < half)  # [HEADS, HALF]
    first_at = heads + token * token_stride + head * head_dim + element
    first_stored = tl.load(first_at, mask=inside, other=0.0)
    first = first_stored.to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)
    dtype = first_stored.dtype
    tl.store(first_at, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(first_at + half, (second * cosine + first * sine).to(dtype), mask=inside)
