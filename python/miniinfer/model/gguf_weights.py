"""The tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ..gguf_file import GGMLType, GGUFError, GGUFFile, GGUFTensor
from .config import ModelConfig
from .dequantize import dequantize
from .errors import ModelLoadError
from .fill import Part
from .gguf_config import INTERLEAVED_ROPE_ARCHITECTURES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GGUFWeights"]

Floats = npt.NDArray[np.float32]
Item = TypeVar("Item", bound=np.generic)

KERNEL_TYPES = frozenset(
    (
        GGMLType.F32,
        GGMLType.BF16,
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.Q8_0,
        GGMLType.Q4_K,
        GGMLType.Q5_K,
        GGMLType.Q6_K,
    )
)
"""Types of which the CPU kernels take the raw bytes."""


class GGUFWeights:
    """The tensors of a GGUF file, dequantised as they are read; see `weights.WeightSource`."""

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
        """See `TensorList`."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorList`."""
        return self._tensors[name].shape

    def read(self, name: str, target: Tensor, part: Part | None = None) -> None:
        """See `WeightSource`. A part of a head would be of no use, as its rows may be reordered."""
        import torch

        if part is None:
            values = np.empty(self.shape(name), np.float32)
            self.read_array(name, values)
        else:
            values = self._read_part(name, part)
        target.copy_(torch.from_numpy(values))

    def _read_part(self, name: str, part: Part) -> Floats:
        blocks, columns = _cut(self._tensors[name], part)
        values = np.empty(blocks.shape, np.float32)
        self._dequantize(blocks, values)
        if self._is_permuted(name):
            values = self._halves_first(values)
        return values[..., columns]

    def read_array(self, name: str, target: Floats) -> None:
        """Copy a tensor to `target`, to whose shape it may be broadcast."""
        tensor = self._tensors[name]
        is_permuted = self._is_permuted(name)
        if target.shape == tensor.shape and target.flags.c_contiguous and not is_permuted:
            self._dequantize(tensor, target)
            return
        values = np.empty(tensor.shape, np.float32)
        self._dequantize(tensor, values)
        target[...] = self._halves_first(values) if is_permuted else values

    def raw(self, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        """Number of a ggml type that has a kernel, and the rows in it: uint8 [rows, bytes].

        Rows of other types come as float32.
        """
        tensor = self._tensors[name]
        rows = tensor.shape[0]
        if tensor.type not in KERNEL_TYPES:
            values = np.empty(tensor.shape, np.float32)
            self.read_array(name, values)
            return GGMLType.F32, values.view(np.uint8).reshape(rows, -1)
        data = tensor.data.reshape(rows, -1)
        return tensor.type, self._halves_first(data) if self._is_permuted(name) else data

    def _is_permuted(self, name: str) -> bool:
        return self._is_interleaved and ("q_proj." in name or "k_proj." in name)

    def _dequantize(self, tensor: GGUFTensor, out: Floats) -> None:
        try:
            dequantize(tensor.data, tensor.type, out.reshape(-1))
        except GGUFError as error:
            raise GGUFError(f"{self.path}: tensor {tensor.name!r}: {error}") from error

    def _halves_first(self, values: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """Rows ordered for a rotation of neighbours, reordered for one of the two halves."""
        pairs = values.reshape(-1, self._config.head_dim // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def rotary_factors(self) -> Floats | None:
        """Divisors of the rotary frequencies, float32 [head_dim / 2], if the file has them.

        Llama 3.1 and later bring their scaling in this form. Raises `ModelLoadError` when they are
        not that many positive numbers.
        """
        tensor = self._rotary_factors
        if tensor is None:
            return None
        factors = np.empty(tensor.shape, np.float32)
        self._dequantize(tensor, factors)
        expected = (self._config.head_dim // 2,)
        if factors.shape != expected:
            raise ModelLoadError(
                f"{self.path}: tensor 'rope_freqs.weight' has the shape {list(factors.shape)}, "
                f"expected {list(expected)}"
            )
        if not (factors > 0).all():
            raise ModelLoadError(
                f"{self.path}: tensor 'rope_freqs.weight' must be positive, not {factors.min()}"
            )
        return factors


def _cut(tensor: GGUFTensor, part: Part) -> tuple[GGUFTensor, slice]:
    """The blocks that hold the part, and which of their columns are its own."""
    elements, size = tensor.type.block_elements, tensor.type.block_bytes
    width = tensor.shape[-1]
    start, stop, _ = part[-1].indices(width)
    first, last = start // elements, -(-stop // elements)
    blocks = tensor.data.reshape(*tensor.shape[:-1], width // elements, size)
    blocks = blocks[(*part[:-1], slice(first, last))]
    shape = (*blocks.shape[:-2], (last - first) * elements)
    columns = slice(start - first * elements, stop - first * elements)
    return GGUFTensor(tensor.name, shape, tensor.type, blocks.reshape(-1)), columns


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
