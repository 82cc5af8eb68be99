"""The Triton kernel of `kv_write`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._fp8 import as_mode, encode_fp8, fp8_mode
from ._launch import tile_of_row


def launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Run the kernel: one program for each token and `TILE` elements of its heads."""
    width = key.shape[1] * key.shape[2]
    tile = tile_of_row(width)
    mode = fp8_mode(key_cache)
    write_kv_kernel[(key.shape[0], triton.cdiv(width, tile))](
        key,
        value,
        as_mode(key_cache, mode),
        as_mode(value_cache, mode),
        slot_mapping,
        key_scale,
        value_scale,
        key.stride(0),
        value.stride(0),
        slot_mapping.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        0 if key_scale is None or key_scale.shape[0] == 1 else key_scale.stride(0),
        0 if value_scale is None or value_scale.shape[0] == 1 else value_scale.stride(0),
        width,
        key.shape[2],
        key_cache.shape[1],
        FP8=mode,
        TILE=tile,
    )


@triton.jit
def write_kv_kernel(
    key,  # [T, Hkv, D]
    value,
    key_cache,  # [num_blocks, block_size, Hkv, D]
    value_cache,
    slot_mapping,  # int64 [T]
    key_scale,  # float32 [1] or [Hkv], or None for 1
    value_scale,
    key_token_stride,
    value_token_stride,
    slot_stride,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    key_scale_stride,
    value_scale_stride,
    width,
    head_dim,
    block_size,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    """The elements of one token's heads from `TILE * program_id(1)` on."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block = slot // block_size
        place = slot % block_size
        element = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
        inside = element < width
        new_key = tl.load(key + token * key_token_stride + element, mask=inside, other=0.0)
        new_value = tl.load(value + token * value_token_stride + element, mask=inside, other=0.0)
        if FP8:
            head = element // head_dim
            new_key = new_key.to(tl.float32)
            new_value = new_value.to(tl.float32)
            if key_scale is not None:
                new_key /= tl.load(key_scale + head * key_scale_stride, mask=inside, other=1.0)
            if value_scale is not None:
                new_value /= tl.load(
                    value_scale + head * value_scale_stride, mask=inside, other=1.0
                )
            new_key = encode_fp8(new_key, FP8)
            new_value = encode_fp8(new_value, FP8)
        key_slot = key_cache + block * key_block_stride + place * key_slot_stride
        value_slot = value_cache + block * value_block_stride + place * value_slot_stride
        tl.store(key_slot + element, new_key, mask=inside)
        tl.store(value_slot + element, new_value, mask=inside)
