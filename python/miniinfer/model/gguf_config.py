"""`ModelConfig` from the metadata of a GGUF file.

The keys are those of the GGUF specification, named after the architecture. What the metadata leaves
out (the vocabulary's size, biases, tied embeddings) is read off the tensors the file has.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..gguf_file import GGUFFile
from .config import MAX_LAYERS, ModelConfig, RopeConfig, check_config
from .errors import ModelLoadError
from .settings import Settings

__all__ = ["INTERLEAVED_ROPE_ARCHITECTURES", "gguf_model_config"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Their q and k rows are stored so that a rotation pairs neighbours instead of halves.
INTERLEAVED_ROPE_ARCHITECTURES = ("llama", "mistral3")

# Settings that change the forward pass and that it does not know; absent or zero in most files.
_UNSUPPORTED_SETTINGS = (
    "expert_count",
    "attention.temperature_scale",
    "rope.scaling.yarn_log_multiplier",
    "logit_scale",
)


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """The configuration of the model in `file`.

    Sliding windows are not read: files of these architectures are run with full attention, as
    llama.cpp does. Raises `ModelLoadError` for an architecture or a setting that is not supported,
    or when a setting is missing.
    """
    general = Settings(file.metadata, file.path)
    name = general.text("general.architecture", "")
    if name not in _ARCHITECTURES:
        general.fail(
            "general.architecture",
            f"of {name!r} is not supported (supported: {', '.join(_ARCHITECTURES)})",
        )
    settings = Settings(file.metadata, file.path, f"{name}.")
    _refuse_unsupported(general, settings)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor 'token_embd.weight' is missing")
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    num_layers = settings.integer("block_count", limit=MAX_LAYERS)
    head_dim = settings.integer("attention.key_length", hidden_size // num_heads)
    if settings.integer("rope.dimension_count", head_dim) != head_dim:
        settings.fail("rope.dimension_count", f"must equal the head size, {head_dim}")
    context_length = settings.integer("context_length")
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    config = ModelConfig(
        architecture=_ARCHITECTURES[name],
        hidden_size=hidden_size,
        intermediate_size=settings.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=context_length,
        rms_norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(settings, context_length),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(None,) * num_layers,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(general),
    )
    check_config(config, file.path)
    return config


def _eos_token_ids(general: Settings) -> tuple[int, ...]:
    """The ids that end a text or a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [item for key in keys for item in general.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))


def _refuse_unsupported(general: Settings, settings: Settings) -> None:
    if general.get("split.count", 1) > 1:
        general.fail(
            "split.count",
            f"of {general.get('split.count')}: split files are not supported, merge them first "
            "(llama-gguf-split --merge)",
        )
    for key in _UNSUPPORTED_SETTINGS:
        if settings.get(key, 0):
            settings.fail(key, f"of {settings.get(key)!r} is not supported")


def _rope(settings: Settings, context_length: int) -> RopeConfig:
    theta = settings.number("rope.freq_base", 10000.0)
    kind = settings.text("rope.scaling.type", "none")
    if kind == "none":
        # Older files give a linear factor alone.
        factor = settings.number("rope.scale_linear", 1.0)
        return RopeConfig(theta=theta, kind="linear" if factor != 1.0 else "default", factor=factor)
    factor = settings.number("rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        settings.fail(
            "rope.scaling.type", f"of {kind!r} is not supported (supported: none, linear, yarn)"
        )
    rope = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=settings.integer(
            "rope.scaling.original_context_length", context_length
        ),
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    multiplier = settings.number("rope.scaling.attn_factor", None)
    if multiplier is None:
        return rope
    # ggml multiplies YaRN's own scale by it, where transformers replaces that scale.
    return replace(rope, attention_factor=multiplier * (1 + 0.1 * math.log(factor)))
