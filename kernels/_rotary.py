"""The Triton kernel of `rotary`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._launch import power_of_2


def launch(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Run the kernel: one program for each token, over a tile of all its heads."""
    tokens, count, head_dim = heads.shape
    half = cos.shape[1]
    if heads.numel() == 0 or half == 0:
        return
    rotary_kernel[(tokens,)](
        heads,
        positions,
        cos,
        sin,
        heads.stride(0),
        positions.stride(0),
        cos.stride(0),
        sin.stride(0),
        count,
        head_dim,
        half,
        INTERLEAVED=interleaved,
        HEADS=power_of_2(count),
        HALF=power_of_2(half),
    )


@triton.jit
def rotary_kernel(
    heads,  # [T, count, head_dim]
    positions,  # int [T]
    cos,  # float32 [P, half]
    sin,
    token_stride,
    position_stride,
    cos_stride,
    sin_stride,
    count,
    head_dim,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    element = tl.arange(0, HALF)[None, :]  # [1, HALF]
    head = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    cosine = tl.load(cos + position * cos_stride + element, mask=element < half, other=0.0)
    sine = tl.load(sin + position * sin_stride + element, mask=element < half, other=0.0)
    inside = (head < count) & (element < half)  # [HEADS, HALF]
    head_at = heads + token * token_stride + head * head_dim
    first_at = head_at + (2 * element if INTERLEAVED else element)
    second_at = first_at + (1 if INTERLEAVED else half)
    first_stored = tl.load(first_at, mask=inside, other=0.0)
    first = first_stored.to(tl.float32)
    second = tl.load(second_at, mask=inside, other=0.0).to(tl.float32)
    dtype = first_stored.dtype
    tl.store(first_at, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(second_at, (second * cosine + first * sine).to(dtype), mask=inside)
