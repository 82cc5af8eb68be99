"""The forward pass of the Llama family over the kernels: four calls a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core import rms_norm
from ..model.batch import ForwardBatch
from ..model.config import ModelConfig
from ..model.llama import LlamaModel
from ..model.weight_layout import ModelWeights
from .attention import CpuAttention, StepArrays

__all__ = ["CpuLlamaModel"]


class CpuLlamaModel(LlamaModel):
    """A decoder whose matrices are `QuantLinear`s (biases within) and whose norms are tensors.

    Everything between the matrices is float32, whatever the weights are.
    """

    attention: CpuAttention  # type: ignore[assignment] # one call in place of the backend's two

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

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        matrices = [self.embedding] if self.lm_head is self.embedding else [self.embedding, self.lm_head]
        total = sum(matrix.num_bytes for matrix in matrices) + self.final_norm.nbytes
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
        config, count = self.config, len(batch.token_ids)
        arrays = self.attention.prepare(batch)
        hidden = self.embedding.gather(batch.token_ids, torch.empty(count, config.hidden_size))
        heads = torch.empty(count, self.layers[0].qkv.rows)
        attended = torch.empty(count, self.layers[0].output.columns)
        gate_up = torch.empty(count, self.layers[0].gate_up.rows)
        for index in range(len(self.layers)):
            self._layer(index, hidden, heads, attended, gate_up, arrays)
        normed = torch.empty_like(hidden)
        rms_norm(
            hidden.data_ptr(),
            self.final_norm.data_ptr(),
            config.rms_norm_eps,
            normed.data_ptr(),
            count,
            config.hidden_size,
        )
        return normed

    def _layer(
        self,
        index: int,
        hidden: Tensor,
        heads: Tensor,
        attended: Tensor,
        gate_up: Tensor,
        arrays: StepArrays,
    ) -> None:
        config, layer = self.config, self.layers[index]
        epsilon = config.rms_norm_eps
        layer.qkv.forward(hidden, heads, norm=layer.input_norm, epsilon=epsilon)
        self.attention.step(
            index,
            heads,
            attended,
            arrays,
            self.rotary_table,
            config.sliding_windows[index],
            layer.head_norm,
            epsilon,
        )
        layer.output.add_to(attended, hidden)
        layer.gate_up.forward(hidden, gate_up, norm=layer.post_norm, epsilon=epsilon)
        layer.down.add_to(gate_up, hidden, silu=True)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logits_index: Tensor) -> Tensor:
        """See `LlamaModel`."""
        rows = hidden.index_select(0, logits_index)
        return self.lm_head.forward(rows, torch.empty(len(rows), self.lm_head.rows))
