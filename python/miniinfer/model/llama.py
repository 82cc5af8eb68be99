"""The forward pass of the Llama family over packed batches.

Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3 are one decoder with a few switches
(`ModelConfig`). Weights are plain tensors; what is used together (q, k and v; gate and up) lies in
one matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from .batch import ForwardBatch
from .config import ModelConfig
from .ops import LayerOps, TorchOps
from .rope import rotary_table
from .weight_layout import ModelWeights

if TYPE_CHECKING:
    from ..attention import AttentionBackend

__all__ = ["LlamaModel"]


class LlamaModel:
    """A decoder.

    `config`: the model. `dtype`, `device`: of the weights. `max_positions`: how many positions the
    rotary table has (default `config.max_model_len`). `ops`: the operations between matrix
    products. `weights`: by default uninitialised ones, to be filled. Set `attention` before the
    first `forward`. Nothing here records gradients.
    """

    attention: AttentionBackend[Any]
    kv_scales: list[tuple[float, float]] | None = None
    """Each layer's scales of keys and of values in a cache of 8-bit floats, if known."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        max_positions: int | None = None,
        ops: LayerOps | None = None,
        weights: ModelWeights[Tensor] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.ops: LayerOps = TorchOps() if ops is None else ops
        self.max_positions = config.max_model_len if max_positions is None else max_positions
        if weights is None:
            weights = ModelWeights.allocate(
                config, lambda shape: torch.empty(shape, dtype=self.dtype, device=self.device)
            )
        self.weights = weights
        self.embedding, self.layers = weights.embedding, weights.layers
        self.final_norm = weights.final_norm
        self.lm_head = self.embedding if weights.lm_head is None else weights.lm_head
        self.set_rotary_factors(None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(slot.target.nbytes for slot in self.weights.slots().values())

    def set_rotary_factors(self, factors: Tensor | None) -> None:
        """Build the rotary table; `factors`: float32 [head_dim / 2], divisors of frequencies."""
        table = rotary_table(self.config.rope, self.config.head_dim, self.max_positions, factors)
        self.rotary_table = table.to(self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """The hidden state behind the final norm for each token: [T, H] of the model's type.

        Writes the step's keys and values into the cache. Raises `ValueError` for a sequence longer
        than the rotary table.
        """
        self._check_length(batch)
        config, ops = self.config, self.ops
        metadata = self.attention.prepare(batch, config.sliding_windows)
        rotary = ops.prepare_rotary(self.rotary_table, batch.positions, self.dtype)
        residual = embedding(batch.token_ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, config.rms_norm_eps)
        following_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, layer in enumerate(self.layers):
            x = self._attention(index, x, batch.slot_mapping, metadata, rotary)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, config.rms_norm_eps)
            x = ops.silu_and_mul(linear(x, layer.gate_up, layer.gate_up_bias))
            x = self._inward(x, layer.down, layer.down_bias)
            x, residual = ops.add_rms_norm(x, residual, following_norms[index], config.rms_norm_eps)
        return x

    def _check_length(self, batch: ForwardBatch) -> None:
        if batch.max_seq_len > self.max_positions:
            raise ValueError(
                f"a sequence of {batch.max_seq_len} tokens exceeds the model's "
                f"{self.max_positions} positions"
            )

    def _attention(
        self, index: int, x: Tensor, slot_mapping: Tensor, metadata: Any, rotary: Any
    ) -> Tensor:
        config, layer = self.config, self.layers[index]
        rotated_heads = config.num_heads + config.num_kv_heads
        heads = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        query_key, value = heads[:, :rotated_heads], heads[:, rotated_heads:]
        if layer.head_norm is not None:
            query_key = self.ops.head_norm(query_key, layer.head_norm, config.rms_norm_eps)
        query_key = self.ops.rotary(query_key, rotary)
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        self.attention.write_kv(index, key, value, slot_mapping)
        window = config.sliding_windows[index]
        attended = self.attention.attend(index, query, metadata, window)
        return self._inward(attended.flatten(1), layer.output, layer.output_bias)

    def _inward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product that leads back from a layer's inside to the hidden state."""
        return linear(x, weight, bias)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logits_index: Tensor) -> Tensor:
        """The logits of the tokens at `logits_index`, int32 [N], of `hidden` [T, H].

        float32 [N, vocab_size].
        """
        return linear(hidden.index_select(0, logits_index), self.lm_head).float()
