"""The Triton kernels of `paged_attention`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._attention_tile import attend_keys, find_request
from ._fp8 import as_mode, fp8_mode
from ._launch import AttentionShape, attention_options, power_of_2, split_count, traits_of


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's cache; see `paged_attention` for shapes."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one launch; see `paged_attention` for shapes."""

    query_start: Tensor
    seq_lens: Tensor
    rows: Tensor
    block_table: Tensor
    num_tokens: int
    """At least the tokens that they have together."""
    max_query_len: int
    max_seq_len: int
    num_splits: int | None
    """How many parts a context is cut into; None: as few as fill the device."""


def launch(
    query: Tensor,
    cache: Cache,
    requests: Requests,
    output: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Run the kernel: one program for each tile of queries, KV head and part of the context.

    A tile of queries holds all heads that share the KV head, so that they read a key once. A
    `window` or `soft_cap` of 0 is none. Where the context is cut, a second kernel joins the parts.
    """
    batch = requests.seq_lens.shape[0]
    if query.numel() == 0 or requests.num_tokens == 0 or requests.max_query_len == 0 or batch == 0:
        return
    block_size, kv_heads, head_dim = cache.keys.shape[1:]
    group = query.shape[1] // kv_heads
    pairs = requests.max_query_len * group
    traits = traits_of(query.device)
    shape = AttentionShape(
        head_dim, group, query.itemsize, cache.keys.itemsize, is_decode=pairs <= 64
    )
    options = attention_options(shape, traits, pairs)
    one_tile = pairs <= options["TILE_Q"]
    tiles = batch if one_tile else requests.num_tokens * group // options["TILE_Q"] + batch
    splits = 1
    if shape.is_decode:
        max_keys = min(requests.max_seq_len, window) if window else requests.max_seq_len
        splits = requests.num_splits or split_count(tiles * kv_heads, max_keys, traits)
    parts = (output, output)
    if splits > 1:
        shape_of_parts = (*query.shape[:2], splits)
        parts = (
            query.new_empty(*shape_of_parts, head_dim, dtype=torch.float32),
            query.new_empty(*shape_of_parts, 2, dtype=torch.float32),
        )
    mode = fp8_mode(cache.keys)
    paged_attention_kernel[(tiles, kv_heads, splits)](
        query,
        as_mode(cache.keys, mode),
        as_mode(cache.values, mode),
        cache.key_scale,
        cache.value_scale,
        requests.query_start,
        requests.seq_lens,
        requests.rows,
        requests.block_table,
        output,
        *parts,
        scale,
        soft_cap,
        window,
        batch,
        query.stride(0),
        *cache.keys.stride()[:3],
        *cache.values.stride()[:3],
        _scale_stride(cache.key_scale),
        _scale_stride(cache.value_scale),
        requests.block_table.stride(0),
        HEADS=query.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        FP8=mode,
        ONE_TILE=one_tile,
        SPLITS=splits,
        # The interpreter would multiply the bits of bfloat16 as integers.
        WIDEN=not query.is_cuda,
        **options,
    )
    if splits > 1:
        _join(requests, output, parts, splits)


def _scale_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)


def _join(requests: Requests, output: Tensor, parts: tuple[Tensor, Tensor], splits: int) -> None:
    heads, head_dim = output.shape[1:]
    grid = (requests.seq_lens.shape[0], requests.max_query_len, heads)
    join_splits_kernel[grid](
        *parts,
        requests.query_start,
        output,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        TILE_S=power_of_2(splits),
        TILE_D=power_of_2(head_dim),
        num_warps=4 if splits > 8 else 1,
    )


@triton.jit
def paged_attention_kernel(
    query,  # [T, HEADS, HEAD_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, Hkv, HEAD_DIM]
    value_cache,
    key_scale,  # float32 [1] or [Hkv], or None for 1
    value_scale,
    query_start,  # int32 [B + 1]
    seq_lens,  # int32 [B]
    rows,  # int32 [B]
    block_table,  # int32 [S, max_blocks]
    output,  # [T, HEADS, HEAD_DIM]
    part_sums,  # float32 [T, HEADS, SPLITS, HEAD_DIM]
    part_stats,  # float32 [T, HEADS, SPLITS, 2]: the greatest score, the sum of the weights
    scale,
    soft_cap,
    window,
    batch,
    query_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    key_scale_stride,
    value_scale_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """The attention of TILE_Q pairs of query and head of one request, over a part of its keys.

    Softmax over tiles of keys (Dao and others, 2022); parts joined later (Flash-Decoding, 2023).
    With ONE_TILE a request has no more than one tile of pairs, and its index is the program's.
    """
    kv_head = tl.program_id(1)
    if ONE_TILE:
        request = tl.program_id(0)
        first_pair = 0
    else:
        request, first_pair = find_request(tl.program_id(0), query_start, batch, GROUP, TILE_Q)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    first_query = first_pair // GROUP
    if first_query >= count:
        return
    seq_len = tl.load(seq_lens + request)
    table = block_table + tl.load(rows + request).to(tl.int64) * table_stride

    pair = first_pair + tl.arange(0, TILE_Q)  # [TILE_Q]
    query_index = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    position = seq_len - count + query_index
    element = tl.arange(0, TILE_D)  # [TILE_D]
    inside = (query_index < count)[:, None] & (element < HEAD_DIM)[None, :]  # [TILE_Q, TILE_D]
    token = (start + query_index).to(tl.int64)
    at = token[:, None] * query_stride + (head * HEAD_DIM)[:, None] + element[None, :]
    queries = tl.load(query + at, mask=inside, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    if key_scale is not None:
        scale *= tl.load(key_scale + kv_head * key_scale_stride)

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - count + first_query - window + 1, 0)
    last_query = tl.minimum((first_pair + TILE_Q - 1) // GROUP, count - 1)
    end_key = seq_len - count + last_query + 1
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end_key - first_key, SPLITS), TILE_K) * TILE_K
        first_key += tl.program_id(2) * part
        end_key = tl.minimum(end_key, first_key + part)
    # Keys before this one are seen by all queries of the tile, and need no mask.
    seen_by_all = tl.minimum(end_key, seq_len - count + first_query + 1)
    if HAS_WINDOW:
        seen_by_all = first_key
    unmasked = tl.maximum(seen_by_all - first_key, 0) // TILE_K * TILE_K

    greatest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, TILE_D], tl.float32)
    for tile in range(first_key, first_key + unmasked, TILE_K):
        greatest, total, sums = attend_keys(
            tile, end_key, queries, position, greatest, total, sums,
            key_cache, value_cache, table, kv_head, scale, soft_cap, window,
            key_block_stride, key_slot_stride, key_head_stride,
            value_block_stride, value_slot_stride, value_head_stride,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, FP8, WIDEN, False, TILE_K, TILE_D,
        )  # fmt: skip
    for tile in range(first_key + unmasked, end_key, TILE_K):
        greatest, total, sums = attend_keys(
            tile, end_key, queries, position, greatest, total, sums,
            key_cache, value_cache, table, kv_head, scale, soft_cap, window,
            key_block_stride, key_slot_stride, key_head_stride,
            value_block_stride, value_slot_stride, value_head_stride,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, FP8, WIDEN, True, TILE_K, TILE_D,
        )  # fmt: skip

    if value_scale is not None:
        sums *= tl.load(value_scale + kv_head * value_scale_stride)
    if SPLITS > 1:
        place = (token * HEADS + head) * SPLITS + tl.program_id(2)  # [TILE_Q]
        is_pair = query_index < count
        tl.store(part_stats + 2 * place, greatest, mask=is_pair)
        tl.store(part_stats + 2 * place + 1, total, mask=is_pair)
        tl.store(part_sums + place[:, None] * HEAD_DIM + element[None, :], sums, mask=inside)
    else:
        # Rows past the last query saw nothing and are not stored; 1 keeps 0 / 0 out of them.
        total = tl.where(total > 0.0, total, 1.0)
        out_at = (token * HEADS + head)[:, None] * HEAD_DIM + element[None, :]
        result = sums / total[:, None]
        tl.store(output + out_at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def join_splits_kernel(
    part_sums,  # float32 [T, HEADS, SPLITS, HEAD_DIM]
    part_stats,  # float32 [T, HEADS, SPLITS, 2]
    query_start,  # int32 [B + 1]
    output,  # [T, HEADS, HEAD_DIM]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """The attention of one query and head, from that over the parts of its context."""
    token = tl.load(query_start + tl.program_id(0)) + tl.program_id(1)
    if token >= tl.load(query_start + tl.program_id(0) + 1):
        return
    row = token.to(tl.int64) * HEADS + tl.program_id(2)
    split = tl.arange(0, TILE_S)  # [TILE_S]
    element = tl.arange(0, TILE_D)  # [TILE_D]
    stats = part_stats + 2 * (row * SPLITS + split)
    greatest = tl.load(stats, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(stats + 1, mask=split < SPLITS, other=0.0)
    # The token sees itself, so that one part at least has a finite score.
    shrink = tl.exp2(greatest - tl.max(greatest, axis=0))
    mask = (total > 0.0)[:, None] & (element < HEAD_DIM)[None, :]  # [TILE_S, TILE_D]
    at = (row * SPLITS + split)[:, None] * HEAD_DIM + element[None, :]
    sums = tl.load(part_sums + at, mask=mask, other=0.0)
    result = tl.sum(sums * shrink[:, None], axis=0) / tl.sum(total * shrink, axis=0)
    out_at = output + row * HEAD_DIM + element
    tl.store(out_at, result.to(output.dtype.element_ty), mask=element < HEAD_DIM)
