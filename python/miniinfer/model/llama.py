"""The forward pass of the Llama family over packed batches.

Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3 are one decoder with a few switches
(`ModelConfig`). Weights are plain tensors; what is used together (q, k and v; gate and up) lies in
one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from .batch import ForwardBatch
from .config import ModelConfig
from .ops import LayerOps, TorchOps
from .rope import rotary_table

if TYPE_CHECKING:
    from ..attention import AttentionBackend

__all__ = ["LayerWeights", "LlamaModel", "WeightSlot"]


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights; matrices are [outputs, inputs]. H: hidden size, I: intermediate size."""

    input_norm: Tensor
    """[H]"""
    qkv: Tensor
    """[(Hq + 2 Hkv) D, H]: q, k and v one below the other."""
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[Hq + Hkv, D]: the norm of q's and k's heads."""
    output: Tensor
    """[H, Hq D]"""
    output_bias: Tensor | None
    post_norm: Tensor
    """[H]"""
    gate_up: Tensor
    """[2 I, H]"""
    gate_up_bias: Tensor | None
    down: Tensor
    """[H, I]"""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes: of `shape`, it is copied (broadcast) to `target`."""

    target: Tensor
    shape: tuple[int, ...]


class LlamaModel:
    """A decoder with uninitialised weights, to be filled through `weight_slots`.

    `config`: the model. `dtype`, `device`: of the weights. `max_positions`: how many positions the
    rotary table has (default `config.max_model_len`). `ops`: the operations between matrix
    products. Set `attention` before the first `forward`. Nothing here records gradients.
    """

    attention: AttentionBackend[Any]

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        max_positions: int | None = None,
        ops: LayerOps | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.ops: LayerOps = TorchOps() if ops is None else ops
        self.max_positions = config.max_model_len if max_positions is None else max_positions
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._allocate_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = self._empty(config.vocab_size, config.hidden_size)
        self.set_rotary_factors(None)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _allocate_layer(self) -> LayerWeights:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        query_width = config.num_heads * config.head_dim
        qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim
        rotated_heads = config.num_heads + config.num_kv_heads
        return LayerWeights(
            input_norm=self._empty(hidden),
            qkv=self._empty(qkv_width, hidden),
            qkv_bias=self._empty(qkv_width) if config.attention_bias else None,
            head_norm=self._empty(rotated_heads, config.head_dim) if config.qk_norm else None,
            output=self._empty(hidden, query_width),
            output_bias=self._empty(hidden) if config.attention_output_bias else None,
            post_norm=self._empty(hidden),
            gate_up=self._empty(2 * inner, hidden),
            gate_up_bias=self._empty(2 * inner) if config.mlp_bias else None,
            down=self._empty(hidden, inner),
            down_bias=self._empty(hidden) if config.mlp_bias else None,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(slot.target.nbytes for slot in self.weight_slots().values())

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor the model needs, by its name in a Hugging Face checkpoint."""
        slots = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for name, target in self._layer_targets(layer).items():
                slots[f"model.layers.{index}.{name}"] = target
        return {name: self._slot(name, target) for name, target in slots.items()}

    def _slot(self, name: str, target: Tensor) -> WeightSlot:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return WeightSlot(target, (self.config.head_dim,))
        return WeightSlot(target, tuple(target.shape))

    def _layer_targets(self, layer: LayerWeights) -> dict[str, Tensor]:
        config = self.config
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        targets = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.o_proj.weight": layer.output,
            "mlp.down_proj.weight": layer.down,
        }
        fused = [("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)]
        for kind, qkv, gate_up in fused:
            if qkv is not None:
                parts = torch.split(qkv, [query_width, kv_width, kv_width])
                for letter, part in zip("qkv", parts, strict=True):
                    targets[f"self_attn.{letter}_proj.{kind}"] = part
            if gate_up is not None:
                gate, up = gate_up.chunk(2)
                targets |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
        if layer.output_bias is not None:
            targets["self_attn.o_proj.bias"] = layer.output_bias
        if layer.down_bias is not None:
            targets["mlp.down_proj.bias"] = layer.down_bias
        if layer.head_norm is not None:
            sizes = [config.num_heads, config.num_kv_heads]
            query_norm, key_norm = torch.split(layer.head_norm, sizes)
            targets["self_attn.q_norm.weight"] = query_norm
            targets["self_attn.k_norm.weight"] = key_norm
        return targets

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
        if batch.max_seq_len > self.max_positions:
            raise ValueError(
                f"a sequence of {batch.max_seq_len} tokens exceeds the model's "
                f"{self.max_positions} positions"
            )
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
            x = linear(x, layer.down, layer.down_bias)
            x, residual = ops.add_rms_norm(x, residual, following_norms[index], config.rms_norm_eps)
        return x

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
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logits_index: Tensor) -> Tensor:
        """The logits of the tokens at `logits_index`, int32 [N], of `hidden` [T, H].

        float32 [N, vocab_size].
        """
        return linear(hidden.index_select(0, logits_index), self.lm_head).float()
