"""How a model's weights lie in memory, and where each tensor of a checkpoint goes.

Nothing here knows what kind of array it handles: weights of a GGUF file are read into numpy's while
torch is still being imported, all others into torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

from .config import ModelConfig

__all__ = ["LayerWeights", "ModelWeights", "WeightSlot"]

Array = TypeVar("Array")
Other = TypeVar("Other")


@dataclass(slots=True)
class LayerWeights(Generic[Array]):
    """One layer's weights; matrices are [outputs, inputs]. H: hidden size, I: intermediate size."""

    input_norm: Array
    """[H]"""
    qkv: Array
    """[(Hq + 2 Hkv) D, H]: q, k and v one below the other."""
    qkv_bias: Array | None
    head_norm: Array | None
    """[Hq + Hkv, D]: the norm of q's and k's heads."""
    output: Array
    """[H, Hq D]"""
    output_bias: Array | None
    post_norm: Array
    """[H]"""
    gate_up: Array
    """[2 I, H]"""
    gate_up_bias: Array | None
    down: Array
    """[H, I]"""
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class WeightSlot(Generic[Array]):
    """Where one tensor of a checkpoint goes: of `shape`, it is copied (broadcast) to `target`."""

    target: Array
    shape: tuple[int, ...]


@dataclass(slots=True)
class ModelWeights(Generic[Array]):
    """All weights of a model."""

    config: ModelConfig
    embedding: Array
    """[vocab_size, H]"""
    layers: list[LayerWeights[Array]]
    final_norm: Array
    """[H]"""
    lm_head: Array | None
    """[vocab_size, H]; None if the embedding takes its place."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        empty: Callable[[tuple[int, ...]], Array],
        *,
        head_rows: int | None = None,
    ) -> ModelWeights[Array]:
        """Weights that `empty` makes, given a shape; `head_rows`: of an `lm_head` that is cut."""
        matrix = (config.vocab_size, config.hidden_size)
        head = matrix if head_rows is None else (head_rows, config.hidden_size)
        return ModelWeights(
            config,
            embedding=empty(matrix),
            layers=[_allocate_layer(config, empty) for _ in range(config.num_layers)],
            final_norm=empty((config.hidden_size,)),
            lm_head=None if config.tie_word_embeddings else empty(head),
        )

    def map(self, convert: Callable[[Array], Other]) -> ModelWeights[Other]:
        """The same weights, each array as `convert` returns it."""
        return ModelWeights(
            self.config,
            embedding=convert(self.embedding),
            layers=[_map_layer(layer, convert) for layer in self.layers],
            final_norm=convert(self.final_norm),
            lm_head=None if self.lm_head is None else convert(self.lm_head),
        )

    def slots(self) -> dict[str, WeightSlot[Array]]:
        """Every tensor the model needs, by its name in a Hugging Face checkpoint."""
        targets = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if self.lm_head is not None:
            targets["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for name, target in self._layer_targets(layer).items():
                targets[f"model.layers.{index}.{name}"] = target
        return {name: self._slot(name, target) for name, target in targets.items()}

    def _slot(self, name: str, target: Array) -> WeightSlot[Array]:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return WeightSlot(target, (self.config.head_dim,))
        return WeightSlot(target, tuple(cast("Any", target).shape))

    def _layer_targets(self, layer: LayerWeights[Array]) -> dict[str, Array]:
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        targets: dict[str, Array | None] = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "mlp.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
        }
        fused = [("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)]
        for kind, qkv, gate_up in fused:
            targets |= {
                f"self_attn.q_proj.{kind}": _rows(qkv, 0, query),
                f"self_attn.k_proj.{kind}": _rows(qkv, query, query + kv),
                f"self_attn.v_proj.{kind}": _rows(qkv, query + kv, query + 2 * kv),
                f"mlp.gate_proj.{kind}": _rows(gate_up, 0, inner),
                f"mlp.up_proj.{kind}": _rows(gate_up, inner, 2 * inner),
            }
        heads, all_heads = config.num_heads, config.num_heads + config.num_kv_heads
        targets["self_attn.q_norm.weight"] = _rows(layer.head_norm, 0, heads)
        targets["self_attn.k_norm.weight"] = _rows(layer.head_norm, heads, all_heads)
        return {name: target for name, target in targets.items() if target is not None}


def _allocate_layer(
    config: ModelConfig, empty: Callable[[tuple[int, ...]], Array]
) -> LayerWeights[Array]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_heads * config.head_dim
    qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim
    rotated_heads = config.num_heads + config.num_kv_heads
    return LayerWeights(
        input_norm=empty((hidden,)),
        qkv=empty((qkv_width, hidden)),
        qkv_bias=empty((qkv_width,)) if config.attention_bias else None,
        head_norm=empty((rotated_heads, config.head_dim)) if config.qk_norm else None,
        output=empty((hidden, query_width)),
        output_bias=empty((hidden,)) if config.attention_output_bias else None,
        post_norm=empty((hidden,)),
        gate_up=empty((2 * inner, hidden)),
        gate_up_bias=empty((2 * inner,)) if config.mlp_bias else None,
        down=empty((hidden, inner)),
        down_bias=empty((hidden,)) if config.mlp_bias else None,
    )


def _map_layer(
    layer: LayerWeights[Array], convert: Callable[[Array], Other]
) -> LayerWeights[Other]:
    converted: dict[str, Any] = {}
    for field in fields(layer):
        array = getattr(layer, field.name)
        converted[field.name] = None if array is None else convert(array)
    return LayerWeights(**converted)


def _rows(array: Array | None, start: int, end: int) -> Array | None:
    return None if array is None else cast("Any", array)[start:end]
