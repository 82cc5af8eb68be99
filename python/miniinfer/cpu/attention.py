"""Attention over the paged cache, by the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import PagedAttention
from ..model.batch import ForwardBatch
from ..model.kv_cache import KVCache
from .tensors import address

__all__ = ["CpuAttention", "StepArrays", "step_arguments"]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step's arrays, checked, as all layers use them."""

    arguments: tuple[tuple[int, int], tuple[int, ...]]
    """The last two arguments of the kernel's `step`."""
    batch: ForwardBatch
    """Holds the memory."""


class CpuAttention:
    """What `DecoderLayers` needs for rotary embedding, writing to the cache and attention.

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
        self._head_dim = head_dim

    def prepare(self, batch: ForwardBatch, rotary_table: Tensor) -> StepArrays:
        """Check a step's arrays, once for all layers. `rotary_table`: float32 [P, D]."""
        tensors = {name: getattr(batch, name) for name in _DTYPES}
        return StepArrays(
            step_arguments(tensors, rotary_table, self._head_dim, batch.num_decodes), batch
        )


def step_arguments(
    tensors: Mapping[str, Tensor], rotary_table: Tensor, head_dim: int, num_decodes: int
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The last two arguments of the kernel's `step`, from a step's arrays by name.

    Raises `ValueError` for types and lengths that do not belong together.
    """
    for name, dtype in _DTYPES.items():
        tensor = tensors[name]
        if tensor.dtype is not dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be {dtype} and contiguous, got {tensor.dtype}")
    positions = rotary_table.shape[0]
    rotary = address("rotary_table", rotary_table, (positions, head_dim))
    tokens, requests = tensors["positions"].shape[0], tensors["seq_lens"].shape[0]
    names = ("slot_mapping", "query_start", "rows")
    lengths = tuple(tensors[name].shape[0] for name in names)
    if lengths != (tokens, requests + 1, requests):
        raise ValueError(
            f"slot_mapping, query_start and rows have {lengths} elements for {tokens} tokens of "
            f"{requests} requests"
        )
    arrays = (tensors[name].data_ptr() for name in _DTYPES)
    return (rotary, positions), (
        *arrays,
        tokens,
        requests,
        *tensors["block_table"].shape,
        num_decodes,
    )


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
