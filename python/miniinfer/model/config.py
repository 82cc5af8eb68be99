"""The configuration of a model, as the forward pass needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import ModelLoadError

__all__ = [
    "MAX_LAYERS",
    "SUPPORTED_ARCHITECTURES",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "check_config",
]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

MAX_LAYERS = 10_000  # far beyond any model; a damaged file must not cost memory

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base and how it is scaled to longer contexts.

    `theta`: the base. `factor`: how many times longer the context is than in pretraining.
    `original_max_position_embeddings`: positions in pretraining (llama3, yarn, dynamic). The other
    fields belong to one kind each and mean what transformers' `rope_parameters` of the same name
    do.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family.

    `architecture`: one of `SUPPORTED_ARCHITECTURES`. `sliding_windows`: for each layer how many
    positions a token sees, itself among them, or None for all. `attention_bias` is on q, k and v,
    `attention_output_bias` on the projection behind the attention. `qk_norm`: RMSNorm on each head
    of q and k. `torch_dtype`: the name of the type the weights were saved in ("bfloat16"), or None.
    `eos_token_ids`: every id that ends a text, from all of the model's files, without repeats.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...]
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_model_len(self) -> int:
        """The longest sequence the position embedding is meant for, in tokens."""
        rope = self.rope
        if rope.kind == "dynamic":
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return int(rope.original_max_position_embeddings * rope.factor)
        return self.max_position_embeddings


def check_config(config: ModelConfig, path: Path) -> None:
    """Raise `ModelLoadError`, naming `path`, when heads or rotation cannot work."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{path}: {config.num_kv_heads} key-value heads do not divide the "
            f"{config.num_heads} attention heads"
        )
    if config.head_dim < 4 or config.head_dim % 2:
        raise ModelLoadError(
            f"{path}: rotary embedding needs an even head size of 4 or more, not {config.head_dim}"
        )
    if config.rope.theta <= 1:
        raise ModelLoadError(
            f"{path}: rotary embedding needs a base above 1, not {config.rope.theta}"
        )
