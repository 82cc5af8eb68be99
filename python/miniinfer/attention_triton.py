"""Attention over the paged cache on a GPU, by the kernels of `miniinfer.kernels`.

To use it: `model.attention = TritonAttention(cache)`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .kernels import paged_attention, write_kv
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache

__all__ = ["TritonAttention"]


class TritonAttention:
    """An `AttentionBackend`: nothing is gathered, and nothing prepared, so that a step launches the
    kernels of its layers and no others.

    `key_scale`, `value_scale`: for a cache of 8-bit floats, float32 [1] or [Hkv], of all layers.
    `num_splits`: see `paged_attention`; by default what suits each step. A fixed one makes a
    request's result independent of what else is in the step.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        num_splits: int | None = None,
    ) -> None:
        self._cache = cache
        self._key_scale = key_scale
        self._value_scale = value_scale
        self._num_splits = num_splits

    def prepare(self, batch: ForwardBatch, windows: Iterable[int | None]) -> ForwardBatch:
        """See `AttentionBackend`: the batch is all that the kernels need."""
        return batch

    def write_kv(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend`."""
        write_kv(
            key,
            value,
            self._cache.keys[layer],
            self._cache.values[layer],
            slot_mapping,
            key_scale=self._key_scale,
            value_scale=self._value_scale,
        )

    def attend(
        self, layer: int, query: Tensor, metadata: ForwardBatch, window: int | None
    ) -> Tensor:
        """See `AttentionBackend`."""
        return paged_attention(
            query,
            self._cache.keys[layer],
            self._cache.values[layer],
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            max_query_len=metadata.max_query_len,
            num_decodes=metadata.num_decodes,
            max_seq_len=metadata.max_seq_len,
            window=window,
            key_scale=self._key_scale,
            value_scale=self._value_scale,
            num_splits=self._num_splits,
        )
