"""Storing the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import (
    FP8,
    check_cache_types,
    check_dense,
    check_scale,
    check_shape,
    use_triton,
)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write `key` and `value`, [T, Hkv, D], into the caches, [num_blocks, block_size, Hkv, D].

    Token t goes to slot `slot_mapping[t]`, int64 [T]: block slot // block_size, place slot %
    block_size. A negative slot skips its token. The caches have the dtype of `key` and `value`, or
    are float8_e4m3fn; in `key` and `value` only the first dimension may be strided, in the caches
    only the first two.
    key_scale, value_scale: for caches of 8 bits, float32 [1] or [Hkv]: what is stored is divided by
        it, rounded to the nearest, and bounded by 448. 1 if None.
    Raises ValueError for other shapes, types or strides.
    """
    for name, new in (("key", key), ("value", value)):
        check_shape(name, new, (slot_mapping.shape[0], *key_cache.shape[2:]))
        check_dense(name, new, 2)
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_dense("key_cache", key_cache, 2)
    check_dense("value_cache", value_cache, 2)
    check_cache_types(key_cache, value_cache, key.dtype)
    check_scale("key_scale", key_scale, key_cache)
    check_scale("value_scale", value_scale, value_cache)
    arguments = (key, value, key_cache, value_cache, slot_mapping)
    if not use_triton(key):
        write_kv_reference(*arguments, key_scale=key_scale, value_scale=value_scale)
    elif key.numel():
        from ._kv_write import launch

        launch(*arguments, key_scale, value_scale)


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """`write_kv` in plain torch."""
    block_size = key_cache.shape[1]
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    where = (slots // block_size, slots % block_size)
    for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        if cache.dtype == FP8:
            # torch does not assign through an index in 8-bit floats.
            cache.view(torch.uint8)[where] = _quantized(new[tokens], scale).view(torch.uint8)
        else:
            cache[where] = new[tokens]


def _quantized(heads: Tensor, scale: Tensor | None) -> Tensor:
    """`heads`, [T, Hkv, D], over `scale` in 8 bits."""
    wide = heads.float()
    if scale is not None:
        wide = wide / scale.unsqueeze(1)
    return wide.clamp(-448.0, 448.0).to(FP8)
