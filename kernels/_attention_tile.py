"""What `paged_attention_kernel` does again and again: find its request, attend a tile of keys."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from ._fp8 import decode_fp8

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_request(program, query_start, batch, GROUP: tl.constexpr, TILE_Q: tl.constexpr):
    """The request of a program, and the first of its pairs that the program takes.

    Request b's programs begin at `query_start[b] * GROUP // TILE_Q + b`. That leaves it as many as
    its pairs need, or one more, which finds no pair left. So the number of programs follows from
    those of tokens and requests, and the host need not know how the tokens are shared out.
    """
    origin = tl.load(query_start)
    low = 0
    high = batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin = (tl.load(query_start + middle) - origin) * GROUP // TILE_Q + middle
        if begin <= program:
            low = middle
        else:
            high = middle - 1
    begin = (tl.load(query_start + low) - origin) * GROUP // TILE_Q + low
    return low, (program - begin) * TILE_Q


@triton.jit
def attend_keys(
    tile,
    end_key,
    queries,  # [TILE_Q, TILE_D]
    position,  # [TILE_Q]
    greatest,  # [TILE_Q], in powers of two
    total,  # [TILE_Q]
    sums,  # [TILE_Q, TILE_D]
    key_cache,
    value_cache,
    table,  # the request's row
    kv_head,
    scale,
    soft_cap,
    window,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    WIDEN: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """`greatest`, `total` and `sums` with the keys at `tile` to `tile + TILE_K` taken in.

    MASKED: some of these are not seen by all queries, or do not exist.
    """
    key_position = tile + tl.arange(0, TILE_K)  # [TILE_K]
    element = tl.arange(0, TILE_D)  # [TILE_D]
    # What is masked is read as zero: an unused cell may hold a NaN, and NaN * 0 is NaN.
    if MASKED:
        cached = key_position < end_key
        block = tl.load(table + key_position // BLOCK_SIZE, mask=cached, other=0)
        mask = cached[:, None] & (element < HEAD_DIM)[None, :]  # [TILE_K, TILE_D]
    else:
        block = tl.load(table + key_position // BLOCK_SIZE)
        mask = (element < HEAD_DIM)[None, :] & (key_position >= 0)[:, None]
    # A block's address may lie beyond 2^31 elements, so its id is widened before the product.
    block = block.to(tl.int64)
    place = key_position % BLOCK_SIZE
    key_at = block * key_block_stride + place * key_slot_stride + kv_head * key_head_stride
    value_at = block * value_block_stride + place * value_slot_stride + kv_head * value_head_stride
    if MASKED or TILE_D > HEAD_DIM:
        keys = tl.load(key_cache + key_at[:, None] + element[None, :], mask=mask, other=0.0)
        values = tl.load(value_cache + value_at[:, None] + element[None, :], mask=mask, other=0.0)
    else:
        keys = tl.load(key_cache + key_at[:, None] + element[None, :])
        values = tl.load(value_cache + value_at[:, None] + element[None, :])
    keys = decode_fp8(keys, FP8, queries.dtype)
    values = decode_fp8(values, FP8, queries.dtype)
    weights_dtype = values.dtype
    if WIDEN:
        keys = keys.to(tl.float32)
        values = values.to(tl.float32)

    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")  # [TILE_Q, TILE_K]
    if HAS_SOFT_CAP:
        scores = scores * scale / soft_cap
        scores = (soft_cap * _LOG2_E) * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    else:
        scores *= scale * _LOG2_E
    if MASKED:
        distance = position[:, None] - key_position[None, :]  # [TILE_Q, TILE_K]
        visible = (distance >= 0) & cached[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))
    new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
    base = new_greatest
    if MASKED:
        # A query that has seen no key yet has no greatest score: -inf less -inf is NaN.
        base = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(greatest - base)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(weights_dtype).to(values.dtype)
    sums = tl.dot(weights, values, sums * shrink[:, None], input_precision="ieee")
    return new_greatest, total, sums
