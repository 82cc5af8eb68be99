"""Reading and writing 8-bit floats, e4m3 without infinities, on any GPU.

GPUs that convert this type themselves do so (`NATIVE`). Others, which Triton would refuse or which
have a type with other exponents, and the interpreter, whose least numbers are wrong, go by the bits
(`BITS`): Micikevicius and others, 2022, section 3.
"""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._dispatch import FP8

OFF, NATIVE, BITS = 0, 1, 2
"""How a cache's elements are converted: not at all, by the GPU, by their bits."""

_OFF = tl.constexpr(OFF)
_BITS = tl.constexpr(BITS)
_GREATEST = tl.constexpr(448.0)


def fp8_mode(cache: Tensor) -> int:
    """`OFF`, `NATIVE` or `BITS` for a cache where it is."""
    if cache.dtype != FP8:
        return OFF
    native = cache.is_cuda and torch.version.hip is None
    return NATIVE if native and torch.cuda.get_device_capability(cache.device) >= (8, 9) else BITS


def as_mode(cache: Tensor, mode: int) -> Tensor:
    """The cache as kernels take it in this mode."""
    return cache.view(torch.uint8) if mode == BITS else cache


@triton.jit
def decode_fp8(stored, MODE: tl.constexpr, dtype: tl.constexpr):
    """The numbers behind loaded elements of a cache, as `dtype`; those of `OFF` as they are."""
    # One branch after the other: Triton compiles what follows a return, whatever the condition.
    if MODE == _OFF:
        numbers = stored
    elif MODE == _BITS:
        # The fields of e4m3 in the places of float16's make a number 2^8 too small, and exact.
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    else:
        numbers = stored.to(dtype)
    return numbers


@triton.jit
def encode_fp8(numbers, MODE: tl.constexpr):
    """float32 numbers as elements of a cache, to the nearest, even ones first, at most 448."""
    bounded = tl.minimum(tl.maximum(numbers, -_GREATEST), _GREATEST)
    # What a maximum makes of NaN differs between GPUs.
    bounded = tl.where(numbers == numbers, bounded, numbers)
    if MODE == _BITS:
        bits = bounded.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        # Half a unit, less one if the last bit kept is even, carries where it must round up.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the unit is 2^-9. Next to 2^23, floats are whole numbers.
        units = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
        subnormal = units.to(tl.uint32, bitcast=True) & 0xF
        rounded = tl.where(size < (121 << 23), subnormal, normal)
        rounded = tl.where(size > 0x7F800000, 0x7F, rounded)
        stored = (sign | rounded).to(tl.uint8)
    else:
        stored = bounded.to(tl.float8e4nv)
    return stored
