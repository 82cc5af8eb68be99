"""A model's weights packed for the kernels, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..model.config import ModelConfig
from ..model.errors import ModelLoadError
from ..model.fill import Progress, TensorList, check_tensors
from ..model.weight_layout import LayerWeights, ModelWeights
from .linear import Bytes, Part, QuantLinear
from .packing import Packing

__all__ = ["PackSource", "pack_weights"]

Floats = npt.NDArray[np.float32]

_F32, _BF16 = 0, 30


class PackSource(TensorList, Protocol):
    """Tensors whose stored bytes can be had."""

    threads: int
    """How many threads may usefully read."""

    def read_array(self, name: str, target: Floats) -> None:
        """Copy a tensor to `target` as float32."""

    def raw(self, name: str) -> tuple[int, Bytes]:
        """Number of a ggml type that has a kernel, and the rows as stored: uint8 [rows, bytes]."""


def pack_weights(
    config: ModelConfig, source: PackSource, packing: Packing, report: Progress
) -> ModelWeights[Any]:
    """Matrices as `QuantLinear`s with their biases, norms as float32 arrays.

    With int4 the embedding and the last layer get 8 bits: their errors go straight into the logits.
    Raises `ModelLoadError`.
    """
    check_tensors(ModelWeights.allocate(config, _without_storage).slots(), source)
    return _Packer(config, source, packing, report).pack()


def _without_storage(shape: tuple[int, ...]) -> Floats:
    return np.broadcast_to(np.float32(0), shape)


class _Packer:
    def __init__(
        self, config: ModelConfig, source: PackSource, packing: Packing, report: Progress
    ) -> None:
        self._config = config
        self._source = source
        self._packing = packing
        self._report = report

    def pack(self) -> ModelWeights[Any]:
        config = self._config
        with ThreadPoolExecutor(self._source.threads) as pool:
            try:
                embedding = pool.submit(self._end, "model.embed_tokens.weight")
                tied = config.tie_word_embeddings
                head = None if tied else pool.submit(self._end, "lm_head.weight")
                jobs = [pool.submit(self._layer, index) for index in range(config.num_layers)]
                layers = []
                for index, job in enumerate(jobs):
                    layers.append(job.result())
                    self._report(index + 1, config.num_layers)
                return ModelWeights(
                    config,
                    embedding=embedding.result(),
                    layers=layers,
                    final_norm=self._vector("model.norm.weight", config.hidden_size),
                    lm_head=None if head is None else head.result(),
                )
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _layer(self, index: int) -> LayerWeights[Any]:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [f"{attention}.{letter}_proj" for letter in "qkv"]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return LayerWeights(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=self._matrix(qkv, config.attention_bias),
            qkv_bias=None,
            head_norm=self._head_norm(attention) if config.qk_norm else None,
            output=self._matrix([f"{attention}.o_proj"], config.attention_output_bias),
            output_bias=None,
            post_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._matrix(gate_up, config.mlp_bias),
            gate_up_bias=None,
            down=self._matrix([f"{mlp}.down_proj"], config.mlp_bias),
            down_bias=None,
        )

    def _end(self, name: str) -> QuantLinear:
        return self._packed([name], "int8" if self._packing == "int4" else self._packing)

    def _matrix(self, names: Sequence[str], has_bias: bool) -> QuantLinear:
        bias = None
        if has_bias:
            bias = []
            for name in names:
                (length,) = self._source.shape(f"{name}.bias")
                bias += self._vector(f"{name}.bias", length).tolist()
        return self._packed([f"{name}.weight" for name in names], self._packing, bias)

    def _packed(
        self, names: Sequence[str], packing: Packing, bias: list[float] | None = None
    ) -> QuantLinear:
        parts = _joined([self._part(name, packing) for name in names])
        try:
            return QuantLinear(parts, bias)
        except ValueError as error:
            raise ModelLoadError(f"{self._source.path}: tensor {names[0]!r}: {error}") from error

    def _part(self, name: str, packing: Packing) -> Part:
        rows, columns = self._source.shape(name)
        if packing == "stored":
            kind, data = self._source.raw(name)
            return kind, 0, data, rows, columns
        values = np.empty((rows, columns), np.float32)
        self._source.read_array(name, values)
        if packing == "bfloat16":
            return _BF16, 0, _to_bfloat16(values).view(np.uint8), rows, columns
        bits = {"int8": 8, "int4": 4, "float32": 0}[packing]
        return _F32, bits, values.view(np.uint8), rows, columns

    def _vector(self, name: str, length: int) -> Floats:
        values = np.empty(length, np.float32)
        self._source.read_array(name, values)
        return values

    def _head_norm(self, prefix: str) -> Floats:
        config = self._config
        norms = [
            np.tile(self._vector(f"{prefix}.{letter}_norm.weight", config.head_dim), (count, 1))
            for letter, count in (("q", config.num_heads), ("k", config.num_kv_heads))
        ]
        return np.concatenate(norms)


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of finite numbers, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one type as one part: fewer, larger pieces of work."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1][:2] == part[:2] and joined[-1][4] == part[4]:
            kind, bits, data, rows, columns = joined[-1]
            joined[-1] = (kind, bits, np.concatenate((data, part[2])), rows + part[3], columns)
        else:
            joined.append(part)
    return joined
