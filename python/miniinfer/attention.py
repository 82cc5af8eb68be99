"""Attention over the paged cache: the interface, and the reference implementation in torch.

In the shapes, T is the number of tokens of a step, B of requests, L of cached positions, Hq and Hkv
of query and key-value heads, G = Hq / Hkv, D the head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .kernels import write_kv_reference
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache

__all__ = ["AttentionBackend", "TorchAttention"]

Metadata = TypeVar("Metadata")

# Elements of gathered keys (and as many of values) that a group of decodes may hold: 64 MiB of
# float32.
_GATHER_ELEMENTS = 1 << 24
# Queries of a prefill chunk attended at a time when a mask must be built.
_MASKED_QUERIES = 256


class AttentionBackend(Protocol[Metadata]):
    """Attention bound to a cache: one `prepare` a step, then per layer `write_kv` and `attend`."""

    def prepare(self, batch: ForwardBatch, windows: Iterable[int | None]) -> Metadata:
        """What all layers share in this step. `windows`: the sliding windows in use."""

    def write_kv(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value, [T, Hkv, D] each, into slots, int64 [T]."""

    def attend(self, layer: int, query: Tensor, metadata: Metadata, window: int | None) -> Tensor:
        """Causal attention of query [T, Hq, D] over each request's cached context: [T, Hq, D].

        `window`: how many positions a token sees, itself among them; None for all.
        """


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes of similar length, attended together."""

    rows: Tensor | None
    """int64 [b]: which of the decodes; None for all of them in order."""
    slots: Tensor
    """int64 [b * L]: the cache slots of each one's context, padded with its own last slot."""
    length: int
    bias: Tensor | None
    """[b, 1, 1, L] in the queries' type: 0 for the context, -inf for the padding."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One request's prefill chunk."""

    start: int
    end: int
    """Its tokens in [0, T)."""
    position: int
    """Position of its first token."""
    first_key: int
    """Position of the first key that any of its tokens sees."""
    slots: Tensor
    """int64 [L]: the cache slots of positions `first_key` and on."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of one step for layers of one window."""

    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class TorchAttention:
    """The reference backend: gathers the context out of the cache and calls torch's attention.

    Only slots that belong to the request are ever gathered (padding repeats its last one), so
    whatever lies in unused parts of the cache and of the block table cannot reach a result.
    Key-value heads are never repeated: the G queries of a head go in as G rows of one matrix.

    `dtype`: of queries, keys and values, by default the cache's; what is stored and read is
    converted.
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype | None = None) -> None:
        self._cache = cache
        self._dtype = cache.keys[0].dtype if dtype is None else dtype
        heads, head_dim = cache.keys[0].shape[2:]
        self._kv_shape = (heads, head_dim)
        self._kv_width = heads * head_dim

    def prepare(
        self, batch: ForwardBatch, windows: Iterable[int | None]
    ) -> dict[int | None, _Plan]:
        """See `AttentionBackend`: one plan for each window."""
        return {
            window: _Plan(tuple(self._decodes(batch, window)), tuple(self._chunks(batch, window)))
            for window in set(windows)
        }

    def write_kv(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend`."""
        caches = self._cache.keys[layer], self._cache.values[layer]
        if self._cache.tensor_scales:
            scales = self._cache.tensor_scales[layer]
            write_kv_reference(
                key, value, *caches, slot_mapping, key_scale=scales[0], value_scale=scales[1]
            )
            return
        for cache, new in zip(caches, (key, value), strict=True):
            cache.view(-1, *self._kv_shape).index_copy_(0, slot_mapping, new.to(cache.dtype))

    def attend(
        self, layer: int, query: Tensor, metadata: dict[int | None, _Plan], window: int | None
    ) -> Tensor:
        """See `AttentionBackend`."""
        plan = metadata[window]
        output = torch.empty_like(query)
        for group in plan.decodes:
            self._attend_decodes(layer, query, group, output)
        for chunk in plan.chunks:
            self._attend_chunk(layer, query, chunk, window, output)
        return output

    def _decodes(self, batch: ForwardBatch, window: int | None) -> Iterator[_DecodeGroup]:
        count = batch.num_decodes
        if not count:
            return
        lengths = batch.seq_lens_host[:count]
        visible = lengths if window is None else np.minimum(lengths, window)
        groups = _group_by_length(visible, _GATHER_ELEMENTS // self._kv_width)
        for group in groups:
            # Most steps are one group, which needs no reordering.
            rows = None if len(groups) == 1 else torch.from_numpy(group).to(batch.rows.device)
            seq_lens, table_rows = batch.seq_lens[:count], batch.rows[:count]
            if rows is not None:
                seq_lens, table_rows = seq_lens[rows], table_rows[rows]
            table = batch.block_table.index_select(0, table_rows)
            yield self._decode_group(rows, seq_lens.long(), table, visible[group], window)

    def _decode_group(
        self,
        rows: Tensor | None,
        seq_lens: Tensor,
        table: Tensor,
        visible: npt.NDArray[np.int32],
        window: int | None,
    ) -> _DecodeGroup:
        length = int(visible.max())
        counts = seq_lens if window is None else seq_lens.clamp(max=window)
        steps = torch.arange(length, device=table.device)
        last = seq_lens[:, None] - 1
        positions = torch.minimum(last + 1 - counts[:, None] + steps, last)
        blocks = table.gather(1, positions // self._cache.block_size).long()
        slots = blocks * self._cache.block_size + positions % self._cache.block_size
        bias = None
        if int(visible.min()) < length:
            bias = torch.zeros(slots.shape, dtype=self._dtype, device=table.device)
            bias.masked_fill_(steps >= counts[:, None], float("-inf"))
            bias = bias[:, None, None]
        return _DecodeGroup(rows, slots.flatten(), length, bias)

    def _chunks(self, batch: ForwardBatch, window: int | None) -> Iterator[_Chunk]:
        block_size = self._cache.block_size
        starts = batch.query_start_host
        for request in range(batch.num_decodes, len(batch.seq_lens_host)):
            start, end = int(starts[request]), int(starts[request + 1])
            seq_len = int(batch.seq_lens_host[request])
            position = seq_len - (end - start)
            first_key = 0 if window is None else max(0, position - window + 1)
            keys = torch.arange(first_key, seq_len, device=batch.block_table.device)
            row = batch.block_table.index_select(0, batch.rows[request : request + 1])[0]
            slots = row[keys // block_size].long() * block_size + keys % block_size
            yield _Chunk(start, end, position, first_key, slots)

    def _gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at `slots`: [len(slots), Hkv, D] each."""
        key_scale = value_scale = None
        if self._cache.tensor_scales:
            key_scale, value_scale = self._cache.tensor_scales[layer]
        keys = self._read(self._cache.keys[layer], slots, key_scale)
        return keys, self._read(self._cache.values[layer], slots, value_scale)

    def _read(self, cache: Tensor, slots: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            found = cache.view(-1, self._kv_width).index_select(0, slots).to(self._dtype)
        else:
            # torch does not index 8-bit floats on every device.
            stored = cache.view(torch.uint8).view(-1, self._kv_width).index_select(0, slots)
            found = (stored.view(cache.dtype).float() * scale).to(self._dtype)
        return found.view(-1, *self._kv_shape)

    def _attend_decodes(
        self, layer: int, query: Tensor, group: _DecodeGroup, output: Tensor
    ) -> None:
        keys, values = self._gather(layer, group.slots)
        heads, head_dim = self._kv_shape
        context = (-1, group.length, heads, head_dim)
        count = len(group.slots) // group.length
        queries = query[:count] if group.rows is None else query[group.rows]
        result = scaled_dot_product_attention(
            queries.reshape(count, heads, -1, head_dim),
            keys.view(context).transpose(1, 2),
            values.view(context).transpose(1, 2),
            attn_mask=group.bias,
        ).reshape(count, *query.shape[1:])
        if group.rows is None:
            output[:count] = result
        else:
            output[group.rows] = result

    def _attend_chunk(
        self, layer: int, query: Tensor, chunk: _Chunk, window: int | None, output: Tensor
    ) -> None:
        heads, head_dim = self._kv_shape
        keys, values = self._gather(layer, chunk.slots)
        # [Hkv, G, L, D]; the keys of a head are one matrix seen by its G queries.
        count = chunk.end - chunk.start
        by_head = (count, heads, -1, head_dim)
        queries = query[chunk.start : chunk.end].view(by_head).permute(1, 2, 0, 3)
        results = output[chunk.start : chunk.end].view(by_head).permute(1, 2, 0, 3)
        shape = (heads, queries.shape[1], -1, head_dim)
        is_square = chunk.position == 0 and (window is None or count <= window)
        step = count if is_square else _MASKED_QUERIES
        for begin in range(0, count, step):
            end = min(begin + step, count)
            position = chunk.position + begin
            low = 0 if window is None else max(0, position - window + 1)
            seen = slice(low - chunk.first_key, chunk.position + end - chunk.first_key)
            mask = None
            if not is_square:
                mask = _causal_mask(position, end - begin, low, window, query.device)
            results[:, :, begin:end] = scaled_dot_product_attention(
                queries[:, :, begin:end],
                keys[seen].transpose(0, 1)[:, None].expand(shape),
                values[seen].transpose(0, 1)[:, None].expand(shape),
                attn_mask=mask,
                is_causal=is_square,
            )


def _group_by_length(
    lengths: npt.NDArray[np.int32], max_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """Indices into `lengths` in groups, longest first.

    Padded to its longest member, a group has at most `max_tokens` (unless it is one sequence) and
    is at least half full, so that one long sequence does not make all others long.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    groups = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        most = max(1, max_tokens // longest)
        long_enough = int(np.count_nonzero(lengths[order[start:]] * 2 >= longest))
        end = start + min(most, long_enough)
        groups.append(order[start:end])
        start = end
    return groups


def _causal_mask(
    position: int, count: int, first_key: int, window: int | None, device: torch.device
) -> Tensor:
    """Which keys, `first_key` to the last query's, each of the queries sees: bool [count, L]."""
    queries = torch.arange(position, position + count, device=device)[:, None]
    keys = torch.arange(first_key, position + count, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
