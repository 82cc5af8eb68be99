"""Storing the keys and values of a step in the paged cache."""

from __future__ import annotations

from torch import Tensor

from ._dispatch import check_dense, check_shape, use_triton


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write `key` and `value`, [T, Hkv, D], into the caches, [num_blocks, block_size, Hkv, D].

    Token t goes to slot `slot_mapping[t]`, int64 [T]: block slot // block_size, place slot %
    block_size. A negative slot skips its token. All four tensors have one dtype; in `key` and
    `value` only the first dimension may be strided, in the caches only the first two.
    Raises ValueError for other shapes or strides.
    """
    for name, new in (("key", key), ("value", value)):
        check_shape(name, new, (slot_mapping.shape[0], *key_cache.shape[2:]))
        check_dense(name, new, 2)
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_dense("key_cache", key_cache, 2)
    check_dense("value_cache", value_cache, 2)
    if not use_triton(key):
        write_kv_reference(key, value, key_cache, value_cache, slot_mapping)
    elif key.numel():
        from ._kv_write import launch

        launch(key, value, key_cache, value_cache, slot_mapping)


def write_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`write_kv` in plain torch."""
    block_size = key_cache.shape[1]
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    where = (slots // block_size, slots % block_size)
    key_cache[where] = key[tokens]
    value_cache[where] = value[tokens]
