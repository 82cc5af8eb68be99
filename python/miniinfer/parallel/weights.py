"""One process's part of a model's tensors."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ..model.config import ModelConfig
from ..model.fill import Part
from ..model.weights import WeightSource
from .shard import Shard

__all__ = ["ShardedWeights"]


class ShardedWeights:
    """A `WeightSource` of the parts that belong to `shard`; the rest is not read."""

    def __init__(self, source: WeightSource, config: ModelConfig, shard: Shard) -> None:
        self.path = source.path
        self.threads = source.threads
        self._source = source
        self._config = config
        self._shard = shard

    def names(self) -> Collection[str]:
        """See `TensorList`."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorList`; of the part."""
        whole = self._source.shape(name)
        part = self._shard.part(name, self._config)
        if part is None:
            return whole
        return tuple(
            len(range(*cut.indices(length))) for cut, length in zip(part, whole, strict=True)
        )

    def read(self, name: str, target: Tensor, part: Part | None = None) -> None:
        """See `WeightSource`."""
        if self._shard.rank > 0 and self._shard.is_summed_bias(name):
            target.zero_()
            return
        self._source.read(name, target, self._shard.part(name, self._config))
