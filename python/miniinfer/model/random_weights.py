"""Weights that nobody trained, for measuring a model without its files."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import ModelConfig
from .fill import Part
from .weight_layout import ModelWeights

__all__ = ["RandomWeights"]

_GGML_F32 = 0


class RandomWeights:
    """A `WeightSource`: matrices of a spread that keeps activations near 1, norms of 1.

    The same for each model: a tensor's numbers follow from its name, and the kind of device.
    """

    threads = 1  # a device's generator is as fast as its memory

    def __init__(self, config: ModelConfig, path: Path) -> None:
        self.path = path
        on_meta = ModelWeights.allocate(config, lambda shape: torch.empty(shape, device="meta"))
        self._shapes = {name: slot.shape for name, slot in on_meta.slots().items()}

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._shapes[name]

    def read(self, name: str, target: Tensor, part: Part | None = None) -> None:
        """See `WeightSource`. Made where the target is."""
        shape = self._shapes[name]
        if part is not None:
            whole = torch.empty(shape, dtype=target.dtype, device=target.device)
            self.read(name, whole)
            target.copy_(whole[part])
            return
        if len(shape) == 1:
            target.fill_(0.0 if name.endswith(".bias") else 1.0)
            return
        seed = zlib.crc32(name.encode())
        generator = torch.Generator(target.device).manual_seed(seed)
        target.normal_(std=shape[1] ** -0.5, generator=generator)

    def read_array(self, name: str, target: npt.NDArray[np.float32]) -> None:
        """Fill `target`."""
        self.read(name, torch.from_numpy(target))

    def raw(self, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        """Number of a ggml type, float32, and the rows in it: uint8 [rows, bytes]."""
        values = np.empty(self._shapes[name], np.float32)
        self.read_array(name, values)
        return _GGML_F32, values.view(np.uint8)
