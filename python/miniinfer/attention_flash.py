"""Attention over the paged cache by the FlashAttention package, where it is installed.

The calls are those of flash-attn 2.6 and later (Dao, 2023): `flash_attn_with_kvcache` for decodes,
`flash_attn_varlen_func` for prefill chunks, both over a block table. Causal masks there are aligned
to the end of the context, as ours are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_write import KernelWrites
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache

__all__ = ["FLASH_BLOCK", "FlashAttention"]

FLASH_BLOCK = 256
"""Blocks must hold a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's arrays as the package takes them, for all layers."""

    num_decodes: int
    table: Tensor
    """int32 [B, blocks]: one row a request."""
    seq_lens: Tensor
    query_start: Tensor
    """int32 [B - decodes + 1]: of the chunks alone, from 0."""
    key_start: Tensor
    """int32, the same of their contexts."""
    max_query_len: int
    max_seq_len: int


class FlashAttention(KernelWrites):
    """An `AttentionBackend` over `flash_attn`, for caches of float16 or bfloat16."""

    def __init__(self, cache: KVCache) -> None:
        import flash_attn

        super().__init__(cache)
        self._chunks = flash_attn.flash_attn_varlen_func
        self._decodes = flash_attn.flash_attn_with_kvcache

    def prepare(self, batch: ForwardBatch, windows: Iterable[int | None]) -> _Plan:
        """See `AttentionBackend`."""
        decodes, lengths = batch.num_decodes, batch.seq_lens_host[batch.num_decodes :]
        blocks = -(-batch.max_seq_len // self.cache.block_size)
        # Entries past a sequence are garbage: the package reads only what the lengths allow.
        table = batch.block_table[:, :blocks].index_select(0, batch.rows)
        contexts = batch.seq_lens[decodes:].cumsum(0, dtype=torch.int32)
        return _Plan(
            decodes,
            table,
            batch.seq_lens,
            batch.query_start[decodes:] - decodes,
            torch.cat((contexts.new_zeros(1), contexts)),
            batch.max_query_len,
            int(lengths.max()) if len(lengths) else 0,
        )

    def attend(self, layer: int, query: Tensor, metadata: _Plan, window: int | None) -> Tensor:
        """See `AttentionBackend`."""
        plan, decodes = metadata, metadata.num_decodes
        caches = self.cache.keys[layer], self.cache.values[layer]
        # How many keys before and behind its own a query sees.
        sight = (-1, -1) if window is None else (window - 1, 0)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decodes:
            output[:decodes] = self._decodes(
                query[:decodes].unsqueeze(1),
                *caches,
                cache_seqlens=plan.seq_lens[:decodes],
                block_table=plan.table[:decodes],
                causal=True,
                window_size=sight,
            ).squeeze(1)
        if decodes < len(query):
            output[decodes:] = self._chunks(
                query[decodes:],
                *caches,
                cu_seqlens_q=plan.query_start,
                cu_seqlens_k=plan.key_start,
                max_seqlen_q=plan.max_query_len,
                max_seqlen_k=plan.max_seq_len,
                causal=True,
                window_size=sight,
                block_table=plan.table[decodes:],
            )
        return output
