"""Where weights come from: safetensors files in a directory, or one GGUF file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..gguf_file import GGUFError, GGUFFile, GGUFTensor
from .config import ModelConfig
from .dequantize import dequantize
from .errors import ModelLoadError
from .gguf_config import INTERLEAVED_ROPE_ARCHITECTURES

__all__ = ["GGUFWeights", "SafetensorsWeights", "WeightSource"]

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class WeightSource(Protocol):
    """Tensors by the names they have in a Hugging Face checkpoint."""

    path: Path
    """Named in errors."""
    threads: int
    """How many threads may usefully call `read`."""

    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor to `target`, converted to its type; it may be broadcast."""


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

    def read(self, name: str, target: Tensor) -> None:
        """See `WeightSource`."""
        part = self._slice(name)
        if part.get_dtype() not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has the type {part.get_dtype()}, which is not "
                f"supported (supported: {', '.join(_FLOAT_TYPES)})"
            )
        target.copy_(part[...])


def _full_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


class GGUFWeights:
    """The tensors of a GGUF file, dequantised as they are read, in the Hugging Face layout."""

    # numpy releases the GIL; beyond a few threads the memory is the limit
    threads = min(8, os.cpu_count() or 1)

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._config = config
        self._is_interleaved = (
            file.metadata["general.architecture"] in INTERLEAVED_ROPE_ARCHITECTURES
        )
        self._tensors = {_huggingface_name(name): tensor for name, tensor in file.tensors.items()}
        self._rotary_factors = file.tensors.get("rope_freqs.weight")

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._tensors[name].shape

    def read(self, name: str, target: Tensor) -> None:
        """See `WeightSource`."""
        tensor = self._tensors[name]
        is_permuted = self._is_interleaved and ("q_proj." in name or "k_proj." in name)
        is_direct = target.dtype == torch.float32 and target.is_cpu and target.is_contiguous()
        if is_direct and target.shape == tensor.shape and not is_permuted:
            self._dequantize(tensor, target.numpy())
            return
        values = self._dequantized(tensor)
        target.copy_(self._halves_first(values) if is_permuted else values)

    def _dequantize(self, tensor: GGUFTensor, out: npt.NDArray[np.float32]) -> None:
        try:
            dequantize(tensor.data, tensor.type, out.reshape(-1))
        except GGUFError as error:
            raise GGUFError(f"{self.path}: tensor {tensor.name!r}: {error}") from error

    def _dequantized(self, tensor: GGUFTensor) -> Tensor:
        values = np.empty(tensor.shape, np.float32)
        self._dequantize(tensor, values)
        return torch.from_numpy(values)

    def _halves_first(self, values: Tensor) -> Tensor:
        """Rows ordered for a rotation of neighbours, reordered for one of the two halves."""
        pairs = values.view(-1, self._config.head_dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)

    def rotary_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies, float32 [head_dim / 2], if the file has them.

        Llama 3.1 and later bring their scaling in this form. Raises `ModelLoadError` when they are
        not that many positive numbers.
        """
        tensor = self._rotary_factors
        if tensor is None:
            return None
        factors = self._dequantized(tensor)
        expected = (self._config.head_dim // 2,)
        if tuple(factors.shape) != expected:
            raise ModelLoadError(
                f"{self.path}: tensor 'rope_freqs.weight' has the shape {list(factors.shape)}, "
                f"expected {list(expected)}"
            )
        if not bool((factors > 0).all()):
            raise ModelLoadError(
                f"{self.path}: tensor 'rope_freqs.weight' must be positive, not {factors.min()}"
            )
        return factors


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _huggingface_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one stays as it is."""
    *block, stem, kind = ("", *name.split("."))[-4 if name.startswith("blk.") else -2 :]
    if stem not in _GGUF_NAMES:
        return name
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_GGUF_NAMES[stem]}.{kind}"
