"""What attention backends over the kernels share: how keys and values get into the cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .kernels import write_kv
from .model.kv_cache import KVCache

__all__ = ["KernelWrites"]


class KernelWrites:
    """The `write_kv` of an `AttentionBackend`, in the cache's type and by its scales."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.scales: Sequence[tuple[Tensor | None, Tensor | None]] = cache.tensor_scales or [
            (None, None)
        ] * len(cache.keys)

    def write_kv(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend`."""
        key_scale, value_scale = self.scales[layer]
        write_kv(
            key,
            value,
            self.cache.keys[layer],
            self.cache.values[layer],
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
        )
