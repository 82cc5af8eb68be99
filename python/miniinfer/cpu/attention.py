"""Attention over the paged cache, by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import PagedAttention
from ..model.batch import ForwardBatch
from ..model.kv_cache import KVCache
from .tensors import address

__all__ = ["CpuAttention", "StepArrays"]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step's arrays, checked, as all layers use them."""

    arguments: tuple[tuple[int, int], tuple[int, ...]]
    """The last two arguments of the kernel's `step`."""
    batch: ForwardBatch
    """Holds the memory."""


class CpuAttention:
    """Rotary embedding, writing to the cache and attention in one call.

    `cache`: of float32, float16, bfloat16, or of int8 with a scale for each token and head.
    Queries, sums and results are float32. The context is read where it lies, once for all query
    heads that share it.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        blocks, block_size, heads, head_dim = cache.keys[0].shape
        scales: Sequence[tuple[Tensor, Tensor] | None] = cache.scales or [None] * len(cache.keys)
        layers = [
            (keys.data_ptr(), values.data_ptr(), *_scale_addresses(pair))
            for keys, values, pair in zip(cache.keys, cache.values, scales, strict=True)
        ]
        dtype = str(cache.keys[0].dtype).removeprefix("torch.")
        self.kernel = PagedAttention(layers, dtype, blocks, block_size, heads, head_dim)
        self._kv_heads, self._head_dim = heads, head_dim

    def prepare(self, batch: ForwardBatch, rotary_table: Tensor) -> StepArrays:
        """Check a step's arrays, once for all layers. `rotary_table`: float32 [P, D]."""
        for name, dtype in _DTYPES.items():
            tensor: Tensor = getattr(batch, name)
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} must be {dtype} and contiguous, got {tensor.dtype}")
        positions = rotary_table.shape[0]
        rotary = address("rotary_table", rotary_table, (positions, self._head_dim))
        tokens, requests = batch.positions.shape[0], batch.seq_lens.shape[0]
        lengths = (batch.slot_mapping.shape[0], batch.query_start.shape[0], batch.rows.shape[0])
        if lengths != (tokens, requests + 1, requests):
            raise ValueError(
                f"slot_mapping, query_start and rows have {lengths} elements for {tokens} tokens "
                f"of {requests} requests"
            )
        arrays = (getattr(batch, name).data_ptr() for name in _DTYPES)
        return StepArrays(
            (
                (rotary, positions),
                (*arrays, tokens, requests, *batch.block_table.shape),
            ),
            batch,
        )

    def step(
        self,
        layer: int,
        heads: Tensor,
        out: Tensor,
        arrays: StepArrays,
        window: int | None = None,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> Tensor:
        """Causal attention of the step's tokens.

        `heads`: float32 [T, (Hq + 2 Hkv) D], queries, keys and values as projected; queries and
        keys are normed (`norm`: [Hq + Hkv, D]) and rotated in place, and keys and values stored.
        `out`: float32 [T, Hq D]. `window`: how many positions a token sees, None for all. Raises
        `ValueError` for positions, slots or blocks that do not exist.
        """
        tokens = arrays.batch.positions.shape[0]
        num_heads = out.shape[1] // self._head_dim
        width, normed = self._head_dim, num_heads + self._kv_heads
        self.kernel.step(
            layer,
            address("heads", heads, (tokens, (normed + self._kv_heads) * width)),
            address("out", out, (tokens, num_heads * width)),
            num_heads,
            window or 0,
            0 if norm is None else address("norm", norm, (normed, width)),
            epsilon,
            *arrays.arguments,
        )
        return out


_DTYPES = {
    "positions": torch.int32,
    "slot_mapping": torch.int64,
    "query_start": torch.int32,
    "seq_lens": torch.int32,
    "rows": torch.int32,
    "block_table": torch.int32,
}


def _scale_addresses(pair: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    return (0, 0) if pair is None else (pair[0].data_ptr(), pair[1].data_ptr())
