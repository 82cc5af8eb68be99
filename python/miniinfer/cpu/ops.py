"""The kernels' attention as an operator of torch: `torch.ops.miniinfer.cpu_paged_attention`.

It takes tensors alone, so that it can sit in any model's forward pass, and in one that
`torch.compile` or `torch.export` traces. miniinfer's own model calls the kernels for all layers at
once instead (`model.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import PagedAttention
from .attention import step_arguments
from .tensors import address

__all__ = ["cpu_paged_attention"]


@torch.library.custom_op(
    "miniinfer::cpu_paged_attention",
    mutates_args=("heads", "key_cache", "value_cache", "key_scales", "value_scales"),
    device_types="cpu",
)
def cpu_paged_attention(
    heads: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    rotary_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    block_table: Tensor,
    num_heads: int,
    num_decodes: int,
    window: int = 0,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """One layer's causal attention for packed requests: float32 [T, Hq D].

    `heads`: float32 [T, (Hq + 2 Hkv) D], queries, keys and values as projected; queries and keys
    are normed (`norm`: float32 [Hq + Hkv, D], with `epsilon`) and rotated in place, and keys and
    values are stored. `key_cache`, `value_cache`: [blocks, block size, Hkv, D] of float32, float16,
    bfloat16 or int8, these with `key_scales` and `value_scales`, float32 [blocks, block size, Hkv].
    `rotary_table`: float32 [P, D], cosines, then sines. `slot_mapping`: int64 [T]. The others are
    int32: `positions` [T], `query_start` [B + 1], `seq_lens` and `rows` [B], `block_table`
    [R, width]. `num_decodes`: the first so many requests have one new token each, whose context is
    streamed past it; the others are attended in tiles. `window`: how many positions a token sees, 0
    for all. Raises `ValueError` for other shapes and types, and for positions, slots or blocks that
    do not exist.
    """
    kernel = _kernel((key_cache, value_cache), (key_scales, value_scales))
    kv_heads, width = key_cache.shape[2:]
    tokens, normed = positions.shape[0], num_heads + kv_heads
    rotary, step = step_arguments(
        {
            "positions": positions,
            "slot_mapping": slot_mapping,
            "query_start": query_start,
            "seq_lens": seq_lens,
            "rows": rows,
            "block_table": block_table,
        },
        rotary_table,
        width,
        num_decodes,
    )
    out = torch.empty(tokens, num_heads * width)
    kernel.step(
        0,
        address("heads", heads, (tokens, (normed + kv_heads) * width)),
        out.data_ptr(),
        num_heads,
        window,
        0 if norm is None else address("norm", norm, (normed, width)),
        epsilon,
        rotary,
        step,
    )
    return out


@cpu_paged_attention.register_fake
def _(heads: Tensor, key_cache: Tensor, *_others: object, **_named: object) -> Tensor:
    kv_heads, width = key_cache.shape[2:]
    return heads.new_empty(heads.shape[0], heads.shape[1] - 2 * kv_heads * width)


def _kernel(
    caches: tuple[Tensor, Tensor], scales: tuple[Tensor | None, Tensor | None]
) -> PagedAttention:
    shape, dtype = tuple(caches[0].shape), caches[0].dtype
    if len(shape) != 4:
        raise ValueError(
            f"key_cache must be [blocks, block size, heads, head size], got {list(shape)}"
        )
    names = ("key_cache", "value_cache")
    layer = [address(name, cache, shape, dtype) for name, cache in zip(names, caches, strict=True)]
    for name, scale in zip(("key_scales", "value_scales"), scales, strict=True):
        if (scale is None) == (dtype is torch.int8):
            raise ValueError(f"{name} go with a cache of int8, and this one is of {dtype}")
        layer.append(0 if scale is None else address(name, scale, shape[:3]))
    keys, values, key_scale, value_scale = layer
    name = str(dtype).removeprefix("torch.")
    return PagedAttention([(keys, values, key_scale, value_scale)], name, *shape)
