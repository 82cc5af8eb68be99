"""`ModelConfig` from a Hugging Face directory: config.json and generation_config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from .config import (
    MAX_LAYERS,
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    RopeConfig,
    RopeKind,
    check_config,
)
from .errors import ModelLoadError
from .settings import Settings

__all__ = ["hf_model_config", "read_hf_config"]

_ARCHITECTURE_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers' config classes take when the file does not say.
_DEFAULT_MISTRAL_WINDOW = 4096
_DEFAULT_QWEN_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_QWEN3_HEAD_DIM = 128


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of the model in `directory`.

    Raises `ModelLoadError` when config.json is missing, is not JSON, or asks for something that is
    not supported.
    """
    values = _read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return hf_model_config(values, generation, directory / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


def hf_model_config(
    values: dict[str, Any], generation: dict[str, Any], path: Path = Path("config.json")
) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json.

    `path` is named in errors. Raises `ModelLoadError` for what is not supported.
    """
    settings = Settings(values, path)
    architecture = _architecture(settings)
    _refuse_unsupported(settings)
    hidden_size = settings.integer("hidden_size")
    num_heads = settings.integer("num_attention_heads")
    num_layers = settings.integer("num_hidden_layers", limit=MAX_LAYERS)
    max_position_embeddings = settings.integer("max_position_embeddings")
    is_llama = architecture == "LlamaForCausalLM"
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = settings.boolean("attention_bias", False)
    bos = settings.token_ids("bos_token_id")
    eos = settings.token_ids("eos_token_id")
    generation_eos = Settings(generation, path.with_name("generation_config.json")).token_ids(
        "eos_token_id"
    )
    default_head_dim = hidden_size // num_heads
    if architecture == "Qwen3ForCausalLM":
        default_head_dim = _DEFAULT_QWEN3_HEAD_DIM
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_dim=settings.integer("head_dim", default_head_dim),
        vocab_size=settings.integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=_rope(settings, max_position_embeddings),
        tie_word_embeddings=settings.boolean("tie_word_embeddings", False),
        attention_bias=is_qwen2 or attention_bias,
        attention_output_bias=attention_bias and not is_qwen2,
        mlp_bias=is_llama and settings.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(settings, architecture, num_layers),
        torch_dtype=settings.text("dtype", settings.text("torch_dtype", "")) or None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos + generation_eos)),
    )
    check_config(config, path)
    return config


def _architecture(settings: Settings) -> str:
    named = settings.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        settings.fail("architectures", f"must be a list of names, not {named!r}")
    model_type = settings.text("model_type", "")
    name = named[0] if named else _ARCHITECTURE_BY_MODEL_TYPE.get(model_type, model_type)
    if name not in SUPPORTED_ARCHITECTURES:
        settings.fail(
            "architectures",
            f"names {name!r}, which is not supported (supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)})",
        )
    return cast(str, name)


def _refuse_unsupported(settings: Settings) -> None:
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        settings.fail("hidden_act", f"of {activation!r} is not supported (supported: silu)")
    quantization = settings.section("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown")
        settings.fail(
            "quantization_config",
            f"with method {method!r} is not supported: use the unquantized model or a GGUF file",
        )
    for key in ("num_experts", "num_local_experts"):
        if settings.get(key, 0):
            settings.fail(key, f"of {settings.get(key)}: mixtures of experts are not supported")
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        settings.fail(
            "partial_rotary_factor",
            f"of {settings.get('partial_rotary_factor')} is not supported (supported: 1.0)",
        )


def _rope(settings: Settings, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` before it."""
    theta = settings.number("rope_theta", 10000.0)
    scaling = settings.section("rope_parameters") or settings.section("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=theta)
    theta = scaling.number("rope_theta", theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        scaling.fail(
            "rope_type",
            f"of {kind!r} is not supported (supported: default, linear, dynamic, llama3, yarn)",
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        scaling.fail(
            "partial_rotary_factor",
            f"of {scaling.get('partial_rotary_factor')} is not supported (supported: 1.0)",
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    original = max_position_embeddings
    if kind in ("llama3", "yarn"):
        original = settings.integer(
            "original_max_position_embeddings",
            scaling.integer("original_max_position_embeddings", max_position_embeddings),
        )
    ratio = max_position_embeddings / original
    rope = RopeConfig(
        theta=theta,
        kind=cast(RopeKind, kind),
        # yarn alone may leave the factor to the two lengths
        factor=scaling.number("factor", ratio) if kind == "yarn" else scaling.number("factor"),
        original_max_position_embeddings=original,
        attention_factor=scaling.number("attention_factor", None),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.number("mscale", None),
        mscale_all_dim=scaling.number("mscale_all_dim", None),
        truncate=scaling.boolean("truncate", True),
    )
    if kind != "llama3":
        return rope
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        scaling.fail("low_freq_factor", f"of {low} must be below high_freq_factor, {high}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _sliding_windows(
    settings: Settings, architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        # An explicit null means full attention, an absent key the default of the first Mistral.
        default = None if "sliding_window" in settings else _DEFAULT_MISTRAL_WINDOW
        return (settings.integer("sliding_window", default),) * num_layers
    if not settings.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = settings.integer("sliding_window", _DEFAULT_QWEN_WINDOW)
    layer_types = settings.get("layer_types")
    if layer_types is None:
        first = settings.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            settings.fail("max_window_layers", f"must be an integer, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    names = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or any(name not in names for name in layer_types):
        settings.fail("layer_types", f"must be a list of {' and '.join(names)}")
    if len(layer_types) != num_layers:
        settings.fail("layer_types", f"has {len(layer_types)} entries for {num_layers} layers")
    return tuple(window if name == "sliding_attention" else None for name in layer_types)
