"""A tiny random Llama with a byte-level tokenizer, for tests of the engine around the model."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 260
EOS = 256


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    assert len(vocab) == 256
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<user>", "<assistant>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_llama(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """A random model of two layers; weights large enough that its greedy choices are clear.

    `overrides` are for its config.json. Written by hand: transformers takes long to import.
    """
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    } | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = _random_weights(config, torch.Generator().manual_seed(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _random_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    values = config["num_key_value_heads"] * config["head_dim"]
    matrices = {"model.embed_tokens": (config["vocab_size"], hidden)}
    if not config["tie_word_embeddings"]:
        matrices["lm_head"] = (config["vocab_size"], hidden)
    norms = ["model.norm"]
    for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        matrices |= {
            f"{layer}.self_attn.q_proj": (queries, hidden),
            f"{layer}.self_attn.k_proj": (values, hidden),
            f"{layer}.self_attn.v_proj": (values, hidden),
            f"{layer}.self_attn.o_proj": (hidden, queries),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    heads = []
    if config["architectures"] == ["Qwen3ForCausalLM"]:
        layers = range(config["num_hidden_layers"])
        heads = [f"model.layers.{layer}.self_attn.{qk}_norm" for layer in layers for qk in "qk"]
    weights = {
        f"{name}.weight": 0.3 * torch.randn(shape, generator=generator)
        for name, shape in matrices.items()
    }
    weights |= {
        f"{name}.weight": 1 + 0.3 * torch.randn(config["head_dim"], generator=generator)
        for name in heads
    }
    return weights | {f"{name}.weight": torch.ones(hidden) for name in norms}


def greedy_reference(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers' generate gives each prompt alone, without stopping at eos."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs
