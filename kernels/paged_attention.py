"""Causal attention of a packed batch over a paged cache: decodes and prefill chunks alike."""

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


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    block_table: Tensor,
    *,
    max_query_len: int,
    num_decodes: int = 0,
    max_seq_len: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of the last tokens of B requests over their cached context: [T, H, D].

    query: [T, H, D], request b's tokens at `query_start[b]` to `query_start[b + 1]`; they are the
        last of its `seq_lens[b]` tokens. Only the first dimension may be strided.
    key_cache, value_cache: [num_blocks, block_size, Hkv, D] in query's dtype or float8_e4m3fn, H a
        multiple of Hkv; the context's own keys and values are already there. The last dimension is
        dense.
    query_start: int32 [B + 1], ascending from 0 to T; a request may have no query.
    seq_lens: int32 [B].
    rows: int32 [B], the row of each request in `block_table`.
    block_table: int32 [S, max_blocks], position p of a request lies in block `table[p //
        block_size]`. Entries past the context are never followed, nor cells past it read.
    max_query_len: at least the number of queries of any request.
    num_decodes: so many requests at the front have one query each, and are computed apart from the
        others, in the way that suits them. (If none has more than one, they are found out.)
    max_seq_len: at least any of `seq_lens`; what the block table has room for if None.
    scale: multiplies the scores; 1 / sqrt(D) if None.
    window: how many positions a token sees, itself among them; all if None.
    soft_cap: bounds the scores to this by a tanh (Gemma 2); no bound if None.
    key_scale, value_scale: for caches of 8 bits, float32 [1] or [Hkv]: multiplies what is read. 1
        if None.
    num_splits: in how many parts, at most 1024, the context of requests with few queries is
        attended side by side, which changes the rounding; None for what suits the device and the
        batch. With a fixed number a decode's result does not depend on the rest of the batch.

    Softmax runs in float32, tile by tile. Raises ValueError where shapes or types do not fit.
    """
    _check(query, key_cache, value_cache, query_start, seq_lens, rows, block_table)
    check_scale("key_scale", key_scale, key_cache)
    check_scale("value_scale", value_scale, value_cache)
    _check_numbers(seq_lens.shape[0], num_decodes, window, soft_cap, num_splits)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if not use_triton(query):
        return paged_attention_reference(
            query,
            key_cache,
            value_cache,
            query_start,
            seq_lens,
            rows,
            block_table,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    from ._paged_attention import Cache, Requests, launch

    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    cache = Cache(key_cache, value_cache, key_scale, value_scale)
    if max_seq_len is None:
        max_seq_len = block_table.shape[1] * key_cache.shape[1]
    tokens, requests = query.shape[0], seq_lens.shape[0]
    for first, last, most in (
        (0, num_decodes, min(1, max_query_len)),
        (num_decodes, requests, max_query_len),
    ):
        part = Requests(
            query_start[first : last + 1],
            seq_lens[first:last],
            rows[first:last],
            block_table,
            num_tokens=num_decodes if last == num_decodes else tokens - num_decodes,
            max_query_len=most,
            max_seq_len=max_seq_len,
            num_splits=num_splits,
        )
        launch(query, cache, part, output, scale, window or 0, soft_cap or 0.0)
    return output


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """`paged_attention` in plain torch, one request at a time."""
    block_size, kv_heads = key_cache.shape[1:3]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    for request, (seq_len, row) in enumerate(zip(seq_lens.tolist(), rows.tolist(), strict=True)):
        start, end = starts[request], starts[request + 1]
        positions = torch.arange(seq_len, device=query.device)
        where = (block_table[row, positions // block_size].long(), positions % block_size)
        keys = _read(key_cache, where, key_scale)
        values = _read(value_cache, where, value_scale)
        groups = query[start:end].float().unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]  # torch's own
        scores = torch.einsum("qhgd,khd->hgqk", groups, keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = positions[seq_len - (end - start) :].unsqueeze(1) - positions
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hgqk,khd->qhgd", weights, values)
        output[start:end] = attended.flatten(1, 2).to(query.dtype)
    return output


def _read(cache: Tensor, where: tuple[Tensor, Tensor], scale: Tensor | None) -> Tensor:
    """The keys or values in cells of a cache, float32 [L, Hkv, D]."""
    if cache.dtype == FP8:
        # torch does not index 8-bit floats on every device.
        wide = cache.view(torch.uint8)[where].view(FP8).float()
    else:
        wide = cache[where].float()
    return wide if scale is None else wide * scale.unsqueeze(1)


def _check_numbers(
    requests: int,
    num_decodes: int,
    window: int | None,
    soft_cap: float | None,
    num_splits: int | None,
) -> None:
    if not 0 <= num_decodes <= requests:
        raise ValueError(
            f"num_decodes must be between 0 and {requests} requests; got {num_decodes}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1; got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be greater than 0; got {soft_cap}")
    if num_splits is not None and not 1 <= num_splits <= 1024:
        raise ValueError(f"num_splits must be between 1 and 1024; got {num_splits}")


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    block_table: Tensor,
) -> None:
    if query.dim() != 3 or key_cache.dim() != 4 or block_table.dim() != 2:
        raise ValueError(
            "query, key_cache and block_table must have 3, 4 and 2 dimensions; got "
            f"{query.dim()}, {key_cache.dim()} and {block_table.dim()}"
        )
    kv_heads, head_dim = key_cache.shape[2:]
    check_shape("query", query, (query.shape[0], query.shape[1], head_dim))
    if query.shape[1] % kv_heads:
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {kv_heads} KV heads")
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_cache_types(key_cache, value_cache, query.dtype)
    check_shape("query_start", query_start, (seq_lens.shape[0] + 1,))
    check_shape("rows", rows, tuple(seq_lens.shape))
    check_dense("query", query, 2)
    for name, tensor in (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("query_start", query_start),
        ("seq_lens", seq_lens),
        ("rows", rows),
        ("block_table", block_table),
    ):
        check_dense(name, tensor, 1)
