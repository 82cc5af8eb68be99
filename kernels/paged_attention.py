"""Causal attention of a packed batch over a paged cache: decodes and prefill chunks alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import check_dense, check_shape, use_triton


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
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last tokens of B requests over their cached context: [T, H, D].

    query: [T, H, D], request b's tokens at `query_start[b]` to `query_start[b + 1]`; they are the
        last of its `seq_lens[b]` tokens. Only the first dimension may be strided.
    key_cache, value_cache: [num_blocks, block_size, Hkv, D] in query's dtype, H a multiple of Hkv;
        the context's own keys and values are already there. The last dimension is dense.
    query_start: int32 [B + 1], ascending from 0 to T; a request may have no query.
    seq_lens: int32 [B].
    rows: int32 [B], the row of each request in `block_table`.
    block_table: int32 [S, max_blocks], position p of a request lies in block `table[p //
        block_size]`. Entries past the context are never followed, nor cells past it read.
    max_query_len: at least the number of queries of any request.
    scale: multiplies the scores; 1 / sqrt(D) if None.
    window: how many positions a token sees, itself among them; all if None.
    soft_cap: bounds the scores to this by a tanh (Gemma 2); no bound if None.

    Softmax runs in float32, tile by tile (Dao and others, 2022). Raises ValueError where shapes
    do not fit.
    """
    _check(query, key_cache, value_cache, query_start, seq_lens, rows, block_table)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1; got {window}")
    arguments = (query, key_cache, value_cache, query_start, seq_lens, rows, block_table)
    if not use_triton(query):
        return paged_attention_reference(*arguments, scale=scale, window=window, soft_cap=soft_cap)
    from ._paged_attention import launch

    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    launch(*arguments, output, max_query_len, scale, window or 0, soft_cap or 0.0)
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
) -> Tensor:
    """`paged_attention` in plain torch, one request at a time."""
    block_size, kv_heads = key_cache.shape[1:3]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    for request, (seq_len, row) in enumerate(zip(seq_lens.tolist(), rows.tolist(), strict=True)):
        start, end = starts[request], starts[request + 1]
        keys = torch.arange(seq_len, device=query.device)
        where = (block_table[row, keys // block_size].long(), keys % block_size)
        groups = query[start:end].float().unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]  # torch's own
        scores = torch.einsum("qhgd,khd->hgqk", groups, key_cache[where].float()) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        distance = positions.unsqueeze(1) - keys
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hgqk,khd->qhgd", weights, value_cache[where].float())
        output[start:end] = attended.flatten(1, 2).to(query.dtype)
    return output


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
    check_shape("query_start", query_start, (seq_lens.shape[0] + 1,))
    check_shape("rows", rows, tuple(seq_lens.shape))
    check_dense("query", query, 2)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_dense(name, tensor, 1)
    for name, tensor in (
        ("query_start", query_start),
        ("seq_lens", seq_lens),
        ("rows", rows),
        ("block_table", block_table),
    ):
        check_dense(name, tensor, 1)
