"""The forward pass of the Llama family over the kernels: one call for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core import DecoderLayers, rms_norm
from ..model.batch import ForwardBatch
from ..model.config import ModelConfig
from ..model.llama import LlamaModel
from ..model.weight_layout import LayerWeights, ModelWeights
from .attention import CpuAttention
from .linear import QuantLinear

__all__ = ["CpuLlamaModel"]


class CpuLlamaModel(LlamaModel):
    """A decoder whose matrices are `QuantLinear`s (biases within) and whose norms are tensors.

    Everything between the matrices is float32, whatever the weights are.
    """

    attention: CpuAttention  # type: ignore[assignment] # one call in place of the backend's two
    embedding: Any
    layers: list[LayerWeights[Any]]
    lm_head: Any

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights[Any],
        *,
        max_positions: int | None = None,
        is_quantized: bool = True,
    ) -> None:
        super().__init__(config, max_positions=max_positions, weights=weights)
        self.is_quantized = is_quantized
        self._head: QuantLinear = self.lm_head
        hidden = (config.hidden_size,)
        heads = (config.num_heads + config.num_kv_heads, config.head_dim)
        _address(self.final_norm, hidden)
        # `self.layers` holds the tensors.
        self._stack = DecoderLayers(
            [
                (
                    layer.qkv.kernel,
                    layer.output.kernel,
                    layer.gate_up.kernel,
                    layer.down.kernel,
                    (
                        _address(layer.input_norm, hidden),
                        _address(layer.head_norm, heads),
                        _address(layer.post_norm, hidden),
                    ),
                    window or 0,
                )
                for layer, window in zip(self.layers, config.sliding_windows, strict=True)
            ],
            config.num_heads,
            config.rms_norm_eps,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        total = int(self.embedding.num_bytes + self.final_norm.nbytes)
        if self.lm_head is not self.embedding:
            total += self.lm_head.num_bytes
        for layer in self.layers:
            total += layer.input_norm.nbytes + layer.post_norm.nbytes
            total += 0 if layer.head_norm is None else layer.head_norm.nbytes
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                total += matrix.num_bytes
        return total

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `LlamaModel`."""
        self._check_length(batch)
        count, first = batch.token_ids.shape[0], self.layers[0]
        buffers = _Buffers(
            hidden=torch.empty(count, self.config.hidden_size),
            heads=torch.empty(count, first.qkv.rows),
            attended=torch.empty(count, first.output.columns),
            gate_up=torch.empty(count, first.gate_up.rows),
        )
        arrays = self.attention.prepare(batch, self.rotary_table)
        self.embedding.gather(batch.token_ids, buffers.hidden)
        self._stack.forward(self.attention.kernel, buffers.addresses, *arrays.arguments)
        normed = torch.empty_like(buffers.hidden)
        rms_norm(
            buffers.addresses[0],
            self.final_norm.data_ptr(),
            self.config.rms_norm_eps,
            normed.data_ptr(),
            count,
            self.config.hidden_size,
        )
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logits_index: Tensor) -> Tensor:
        """See `LlamaModel`."""
        rows = hidden.index_select(0, logits_index)
        return self._head.forward(rows, torch.empty(rows.shape[0], self._head.rows))


class _Buffers:
    """One step's activations, float32; their addresses are hidden, heads, attended, gate_up."""

    def __init__(self, hidden: Tensor, heads: Tensor, attended: Tensor, gate_up: Tensor) -> None:
        self.hidden = hidden
        self._others = (heads, attended, gate_up)
        self.addresses = (
            hidden.data_ptr(),
            heads.data_ptr(),
            attended.data_ptr(),
            gate_up.data_ptr(),
        )


def _address(tensor: Tensor | None, shape: tuple[int, ...]) -> int:
    if tensor is None:
        return 0
    if tensor.dtype is torch.float32 and tensor.shape == shape and tensor.is_contiguous():
        return tensor.data_ptr()
    raise ValueError(f"a norm must be float32 {list(shape)} and contiguous, got {tensor.shape}")
