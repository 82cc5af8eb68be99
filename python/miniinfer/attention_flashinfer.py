"""Attention over the paged cache by the FlashInfer package, where it is installed.

The calls are those of flashinfer 0.2 and later (Ye and others, 2025): a wrapper is planned once a
step and run once a layer, over pages in the layout `NHD`, which is our cache's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attention_write import KernelWrites
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache

__all__ = ["FlashInferAttention"]

_WORKSPACE = 128 << 20
"""Bytes that the package's documentation gives each device."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of some of a step's requests, as a compressed table."""

    starts: Tensor
    """int32 [B + 1], in host memory: where each request's pages begin in `pages`."""
    pages: Tensor
    """int32, on the device."""
    last_lengths: Tensor
    """int32 [B], in host memory: tokens in the last page, at least 1."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The wrappers that were planned for layers of one window; None where nothing is to do."""

    num_decodes: int
    decodes: Any
    chunks: Any


class FlashInferAttention(KernelWrites):
    """An `AttentionBackend` over `flashinfer`.

    `num_heads`: of the queries. `dtype`: of queries and results.
    """

    def __init__(self, cache: KVCache, num_heads: int, dtype: torch.dtype) -> None:
        import flashinfer

        super().__init__(cache)
        self._num_heads, self._dtype = num_heads, dtype
        self._package: Any = flashinfer
        device = cache.keys[0].device
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, int | None], Any] = {}

    def prepare(
        self, batch: ForwardBatch, windows: Iterable[int | None]
    ) -> dict[int | None, _Plan]:
        """See `AttentionBackend`: one plan for each window."""
        decodes, requests = batch.num_decodes, len(batch.seq_lens_host)
        first = self._pages(batch, 0, decodes)
        second = self._pages(batch, decodes, requests)
        query_start = torch.from_numpy(batch.query_start_host[decodes:] - decodes)
        return {
            window: _Plan(
                decodes,
                self._plan_decodes(first, window) if decodes else None,
                self._plan_chunks(second, query_start, window) if decodes < requests else None,
            )
            for window in set(windows)
        }

    def attend(
        self, layer: int, query: Tensor, metadata: dict[int | None, _Plan], window: int | None
    ) -> Tensor:
        """See `AttentionBackend`."""
        plan, cache = metadata[window], self.cache
        caches = cache.keys[layer], cache.values[layer]
        numbers = cache.scale_numbers[layer] if cache.scale_numbers else (None, None)
        scales = {"k_scale": numbers[0], "v_scale": numbers[1]}
        count = plan.num_decodes
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if plan.decodes is not None:
            output[:count] = plan.decodes.run(query[:count].contiguous(), caches, **scales)
        if plan.chunks is not None:
            output[count:] = plan.chunks.run(query[count:].contiguous(), caches, **scales)
        return output

    def _pages(self, batch: ForwardBatch, first: int, last: int) -> _Pages:
        size = self.cache.block_size
        lengths = batch.seq_lens_host[first:last]
        counts = -(-lengths // size)
        starts = np.zeros(last - first + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        # The places of the used entries in the table, which stays on the device.
        row = np.repeat(np.arange(last - first), counts)
        column = np.arange(starts[-1]) - starts[row]
        where = torch.from_numpy(np.stack((row, column))).to(batch.block_table.device)
        table_rows = batch.rows[first:last].index_select(0, where[0])
        pages = batch.block_table[table_rows.long(), where[1].long()]
        last_lengths = (lengths - 1) % size + 1
        return _Pages(torch.from_numpy(starts), pages, torch.from_numpy(last_lengths))

    def _plan_decodes(self, pages: _Pages, window: int | None) -> Any:
        wrapper = self._wrapper("BatchDecodeWithPagedKVCacheWrapper", window)
        wrapper.plan(
            pages.starts, pages.pages, pages.last_lengths, *self._sizes(), **self._options(window)
        )
        return wrapper

    def _plan_chunks(self, pages: _Pages, query_start: Tensor, window: int | None) -> Any:
        wrapper = self._wrapper("BatchPrefillWithPagedKVCacheWrapper", window)
        wrapper.plan(
            query_start,
            pages.starts,
            pages.pages,
            pages.last_lengths,
            *self._sizes(),
            causal=True,
            **self._options(window),
        )
        return wrapper

    def _wrapper(self, name: str, window: int | None) -> Any:
        wrapper = self._wrappers.get((name, window))
        if wrapper is None:
            wrapper = getattr(self._package, name)(self._workspace, "NHD")
            self._wrappers[name, window] = wrapper
        return wrapper

    def _sizes(self) -> tuple[int, int, int, int]:
        _, block_size, heads, head_dim = self.cache.keys[0].shape
        return self._num_heads, heads, head_dim, block_size

    def _options(self, window: int | None) -> dict[str, Any]:
        return {
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self.cache.keys[0].dtype,
        }
