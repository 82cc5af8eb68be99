"""Where weights come from; the safetensors files of a directory."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelLoadError
from .fill import Part, TensorList

__all__ = ["SafetensorsWeights", "WeightSource"]

_GGML_F32, _GGML_BF16 = 0, 30
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class WeightSource(TensorList, Protocol):
    """Tensors that can be read."""

    threads: int
    """How many threads may usefully call `read`."""

    def read(self, name: str, target: Tensor, part: Part | None = None) -> None:
        """Copy a tensor, or a part of it, to `target`, converted to its type.

        It may be broadcast.
        """


class SafetensorsWeights:
    """The safetensors files of a directory: one, or shards listed in an index.

    Raises `ModelLoadError` for a missing or damaged file, and for tensors that are not floating
    point.
    """

    threads = 1  # torch converts with its own threads

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._files: dict[str, Any] = {}
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.is_file():
            file = self._open(single)
            self._file_of = dict.fromkeys(file.keys(), file)
        elif index.is_file():
            self._file_of = self._open_shards(index)
        else:
            raise ModelLoadError(
                f"{directory}: has neither model.safetensors nor model.safetensors.index.json "
                "(PyTorch .bin files are not supported)"
            )
        if "embed_tokens.weight" in self._file_of:
            # Embedding models are saved without the part in front.
            self._stored_names = {_full_name(name): name for name in self._file_of}
        else:
            self._stored_names = {name: name for name in self._file_of}

    def _open(self, path: Path) -> Any:
        if path.name not in self._files:
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelLoadError(f"{path}: the index names it, but it is missing") from error
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error
            self._files[path.name] = file
        return self._files[path.name]

    def _open_shards(self, index: Path) -> dict[str, Any]:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            entries = dict(weight_map).items()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelLoadError(f"{index}: not a valid index of shards: {error!r}") from error
        file_of: dict[str, Any] = {}
        for name, file_name in entries:
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ModelLoadError(f"{index}: {file_name!r} is not a file name")
            file_of[name] = self._open(self.path / file_name)
        return file_of

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._stored_names.keys()

    def _slice(self, name: str) -> Any:
        stored = self._stored_names[name]
        try:
            return self._file_of[stored].get_slice(stored)
        except SafetensorError as error:
            raise ModelLoadError(f"{self.path}: tensor {name!r}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, target: Tensor, part: Part | None = None) -> None:
        """See `WeightSource`."""
        stored = self._slice(name)
        if stored.get_dtype() not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has the type {stored.get_dtype()}, which is not "
                f"supported (supported: {', '.join(_FLOAT_TYPES)})"
            )
        target.copy_(stored[...] if part is None else stored[part])

    def read_array(self, name: str, target: npt.NDArray[np.float32]) -> None:
        """Copy a tensor to `target` as float32."""
        self.read(name, torch.from_numpy(target))

    def raw(self, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        """Number of a ggml type, bfloat16 or float32, and the rows in it: uint8 [rows, bytes]."""
        part = self._slice(name)
        if part.get_dtype() == "BF16":
            return _GGML_BF16, part[...].contiguous().view(torch.uint8).numpy()
        values = np.empty(self.shape(name), np.float32)
        self.read_array(name, values)
        return _GGML_F32, values.view(np.uint8)


def _full_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"
