"""The Triton kernel of `kv_write`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def launch(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Run the kernel: one program for each token and `_TILE` elements of its heads."""
    width = key.shape[1] * key.shape[2]
    tile = min(_TILE, triton.next_power_of_2(width))
    _write_kv_kernel[(key.shape[0], triton.cdiv(width, tile))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        slot_mapping.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        width,
        key_cache.shape[1],
        TILE=tile,
    )


@triton.jit
def _write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token_stride,
    value_token_stride,
    slot_stride,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    width,
    block_size,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block = slot // block_size
        place = slot % block_size
        element = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = element < width
        new_key = tl.load(key + token * key_token_stride + element, mask=inside)
        new_value = tl.load(value + token * value_token_stride + element, mask=inside)
        key_slot = key_cache + block * key_block_stride + place * key_slot_stride
        value_slot = value_cache + block * value_block_stride + place * value_slot_stride
        tl.store(key_slot + element, new_key, mask=inside)
        tl.store(value_slot + element, new_value, mask=inside)
