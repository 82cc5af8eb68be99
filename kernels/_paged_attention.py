"""The Triton kernel of `paged_attention`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# The least side of a matrix product.
_LEAST_TILE = 16


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    block_table: Tensor,
    output: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Run the kernel: one program for each request, KV head and tile of its queries.

    A tile of queries holds all heads that share the KV head, so that they read a key once. A
    `window` or `soft_cap` of 0 is none.
    """
    if query.numel() == 0 or max_query_len == 0:
        return
    kv_heads, head_dim = key_cache.shape[2:]
    group = query.shape[1] // kv_heads
    tiles = tile_sizes(head_dim, group, max_query_len)
    grid = (seq_lens.shape[0], kv_heads, triton.cdiv(max_query_len * group, tiles["TILE_Q"]))
    paged_attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        query_start,
        seq_lens,
        rows,
        block_table,
        output,
        scale,
        soft_cap,
        window,
        query.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        key_cache.shape[1],
        HEADS=query.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        # The interpreter would multiply the bits of bfloat16 as integers.
        WIDEN=not query.is_cuda,
        **tiles,
    )


def tile_sizes(head_dim: int, group: int, max_query_len: int) -> dict[str, int]:
    """The tiles: `TILE_Q` pairs of query and head, by `TILE_K` keys, by `TILE_D` elements."""
    tile_d = max(_LEAST_TILE, triton.next_power_of_2(head_dim))
    most = 64 if tile_d <= 128 else 32
    tile_q = min(most, max(_LEAST_TILE, triton.next_power_of_2(max_query_len * group)))
    return {"TILE_Q": tile_q, "TILE_K": most, "TILE_D": tile_d}


@triton.jit
def paged_attention_kernel(
    query,  # [T, HEADS, HEAD_DIM]
    key_cache,  # [num_blocks, block_size, Hkv, HEAD_DIM]
    value_cache,
    query_start,  # int32 [B + 1]
    seq_lens,  # int32 [B]
    rows,  # int32 [B]
    block_table,  # int32 [S, max_blocks]
    output,  # [T, HEADS, HEAD_DIM]
    scale,
    soft_cap,
    window,
    query_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    block_size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """The attention of TILE_Q pairs of query and head of one request, over all keys they see."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    first_query = tl.program_id(2) * TILE_Q // GROUP
    if first_query >= count:
        return
    seq_len = tl.load(seq_lens + request)
    table = block_table + tl.load(rows + request).to(tl.int64) * table_stride

    pair = tl.program_id(2) * TILE_Q + tl.arange(0, TILE_Q)  # [TILE_Q]
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

    greatest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_Q, TILE_D], tl.float32)
    last_query = tl.minimum((tl.program_id(2) * TILE_Q + TILE_Q - 1) // GROUP, count - 1)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - count + first_query - window + 1, 0)
    end_key = seq_len - count + last_query + 1
    for tile in range(first_key, end_key, TILE_K):
        key_position = tile + tl.arange(0, TILE_K)  # [TILE_K]
        cached = key_position < end_key
        # A block's address may lie beyond 2^31 elements, so its id is widened before the product.
        block = tl.load(table + key_position // block_size, mask=cached, other=0).to(tl.int64)
        place = key_position % block_size
        key_at = block * key_block_stride + place * key_slot_stride + kv_head * key_head_stride
        value_at = (
            block * value_block_stride + place * value_slot_stride + kv_head * value_head_stride
        )
        # What is masked is read as zero: an unused cell may hold a NaN, and NaN * 0 is NaN.
        mask = cached[:, None] & (element < HEAD_DIM)[None, :]  # [TILE_K, TILE_D]
        keys = tl.load(key_cache + key_at[:, None] + element[None, :], mask=mask, other=0.0)
        values = tl.load(value_cache + value_at[:, None] + element[None, :], mask=mask, other=0.0)

        weights_dtype = values.dtype
        if WIDEN:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        distance = position[:, None] - key_position[None, :]  # [TILE_Q, TILE_K]
        visible = (distance >= 0) & cached[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        # A query that has seen no key yet has no greatest score: -inf less -inf is NaN.
        base = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(greatest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(weights_dtype).to(values.dtype), values, input_precision="ieee")
        greatest = new_greatest

    # Rows past the last query saw nothing and are not stored; 1 keeps 0 / 0 out of them.
    total = tl.where(total > 0.0, total, 1.0)
    out_at = token[:, None] * (HEADS * HEAD_DIM) + (head * HEAD_DIM)[:, None] + element[None, :]
    result = sums / total[:, None]
    tl.store(output + out_at, result.to(output.dtype.element_ty), mask=inside)
