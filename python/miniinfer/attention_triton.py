"""Attention over the paged cache on a GPU, by the kernels of `miniinfer.kernels`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .attention_write import KernelWrites
from .kernels import paged_attention
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache

__all__ = ["TritonAttention"]


class TritonAttention(KernelWrites):
    """An `AttentionBackend`: nothing is gathered, and nothing prepared, so that a step launches the
    kernels of its layers and no others.

    `num_splits`: see `paged_attention`; by default what suits each step. A fixed one makes a
    request's result independent of what else is in the step.
    """

    is_capturable = True

    def __init__(self, cache: KVCache, *, num_splits: int | None = None) -> None:
        super().__init__(cache)
        self._num_splits = num_splits

    def prepare(self, batch: ForwardBatch, windows: Iterable[int | None]) -> ForwardBatch:
        """See `AttentionBackend`: the batch is all that the kernels need."""
        return batch

    def attend(
        self, layer: int, query: Tensor, metadata: ForwardBatch, window: int | None
    ) -> Tensor:
        """See `AttentionBackend`."""
        key_scale, value_scale = self.scales[layer]
        return paged_attention(
            query,
            self.cache.keys[layer],
            self.cache.values[layer],
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            max_query_len=metadata.max_query_len,
            num_decodes=metadata.num_decodes,
            max_seq_len=metadata.max_seq_len,
            window=window,
            key_scale=key_scale,
            value_scale=value_scale,
            num_splits=self._num_splits,
        )
