"""The built-in model in transformers, its weights dequantised by the gguf package alone."""

from pathlib import Path
from typing import Any

import gguf
import torch

from model_helpers import gguf_name


def transformers_from_gguf(path: Path) -> Any:
    """A float32 `LlamaForCausalLM` with tied embeddings, from a llama GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"),
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.model.state_dict().items():
        tensor = tensors[gguf_name(f"model.{name}")]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(values.copy()).reshape(parameter.shape)
        if "q_proj" in name or "k_proj" in name:
            # GGUF interleaves the two halves that transformers' rotary embedding keeps apart.
            pairs = values.view(-1, hidden // heads // 2, 2, hidden)
            values = pairs.transpose(1, 2).reshape(parameter.shape)
        parameter.copy_(values)
    model.generation_config.pad_token_id = None
    return model
