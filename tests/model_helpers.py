"""Small random models, and a driver that runs ours over a paged cache as an engine would."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miniinfer.model import ForwardBatch, KVCache, LlamaModel
from miniinfer.runner import attach_attention

VOCAB_SIZE = 97
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def with_random_weights(model: LlamaModel) -> LlamaModel:
    """A model of ours with the same random weights each time."""
    generator = torch.Generator().manual_seed(1)
    for name, slot in model.weights.slots().items():
        noise = torch.randn(slot.target.shape, generator=generator)
        scale = 0.3 if noise.dim() == 1 else 1.5 * noise.shape[-1] ** -0.5
        slot.target.copy_(noise * scale + ("norm" in name))
    return model


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model of `family` (llama, mistral, qwen2, qwen3) with random weights."""
    import transformers

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config_class = getattr(transformers, f"{names[family]}Config")
    model_class = getattr(transformers, f"{names[family]}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**TINY | overrides)).eval()
    for name, parameter in model.named_parameters():
        # Weights large enough that attention is far from uniform, norms and biases not trivial.
        spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        center = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(center, 1.5 * spread)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """float32 [len(tokens), vocabulary]"""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def reference_decode_logits(model: Any, tokens: list[int]) -> Tensor:
    """As `reference_logits`, but computed one token at a time over transformers' own cache."""
    import transformers

    cache = transformers.DynamicCache()
    parameters = inspect.signature(type(model).forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    with torch.inference_mode():
        steps = [
            model(torch.tensor([[token]]), use_cache=True, **{argument: cache}).logits[0, -1]
            for token in tokens
        ]
    return torch.stack(steps)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small only lose by being shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


@dataclass
class _Sequence:
    row: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class PagedRunner:
    """Steps a model over sequences that grow in shuffled blocks of a cache full of NaN."""

    ROWS = 16
    MAX_BLOCKS = 512

    def __init__(
        self, model: LlamaModel, block_size: int = 8, num_tokens: int = 2048, seed: int = 0
    ) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        num_blocks = -(-num_tokens // block_size)
        self.cache = KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            model.device,
        )
        for tensor in self.cache.keys + self.cache.values:
            tensor.fill_(float("nan"))
        attach_attention(model, self.cache)
        generator = np.random.default_rng(seed)
        self.free_blocks = generator.permutation(num_blocks).tolist()
        self.free_rows = generator.permutation(self.ROWS).tolist()
        # Entries past a sequence's end are garbage: here ids far out of range.
        self.block_table = np.full((self.ROWS, self.MAX_BLOCKS), 2**30, np.int32)
        self.sequences: dict[str, _Sequence] = {}

    def step(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """Run one packed batch; returns each chunk's logits, [tokens, vocabulary]."""
        batch, order = self.batch(chunks)
        hidden = self.model.forward(batch)
        logits = self.model.logits(hidden, batch.logits_index)
        assert logits.dtype == torch.float32
        sizes = [len(chunks[name]) for name in order]
        return dict(zip(order, logits.split(sizes), strict=True))

    def batch(self, chunks: dict[str, list[int]]) -> tuple[ForwardBatch, list[str]]:
        """The step's arrays, decodes first, and the order of the names in them."""
        order = sorted(chunks, key=lambda name: len(chunks[name]) > 1)
        positions, slots, rows, seq_lens = [], [], [], []
        for name in order:
            sequence = self.sequences.get(name)
            if sequence is None:
                sequence = self.sequences[name] = _Sequence(self.free_rows.pop())
            for _ in chunks[name]:
                if sequence.length % self.block_size == 0:
                    block = self.free_blocks.pop()
                    self.block_table[sequence.row, len(sequence.blocks)] = block
                    sequence.blocks.append(block)
                offset = sequence.length % self.block_size
                slots.append(sequence.blocks[-1] * self.block_size + offset)
                positions.append(sequence.length)
                sequence.length += 1
            rows.append(sequence.row)
            seq_lens.append(sequence.length)
        lengths = [len(chunks[name]) for name in order]
        query_start = np.cumsum([0, *lengths], dtype=np.int32)
        seq_lens_host = np.array(seq_lens, np.int32)
        total = int(query_start[-1])

        def int32(values: Any) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32)

        batch = ForwardBatch(
            token_ids=int32([token for name in order for token in chunks[name]]),
            positions=int32(positions),
            slot_mapping=torch.tensor(slots),
            query_start=int32(query_start),
            seq_lens=int32(seq_lens),
            rows=int32(rows),
            block_table=torch.from_numpy(self.block_table),
            logits_index=int32(range(total)),
            num_decodes=lengths.count(1),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
            query_start_host=query_start,
            seq_lens_host=seq_lens_host,
        )
        return batch, order

    def run(self, tokens: list[int], chunk_sizes: list[int], name: str = "a") -> Tensor:
        """All logits of one sequence computed alone, in chunks (the last size repeats)."""
        parts, start, sizes = [], 0, list(chunk_sizes)
        while start < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            parts.append(self.step({name: tokens[start : start + size]})[name])
            start += size
        return torch.cat(parts)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kind: str = "F32",
    *,
    blocks: dict[str, np.ndarray] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra_values: dict[str, Any] | None = None,
) -> Path:
    """Write a transformers model as a GGUF file, as llama.cpp's converter lays it out.

    `kind`: the type of the matrices; for the K types give their raw `blocks` by GGUF name, [rows,
    bytes]. A tied head is left out.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    add_value = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (extra_values or {}).items():
        add_value[type(value)](key, value)
    quantized = gguf.GGMLQuantizationType[kind]
    for name, values in gguf_tensors(model, architecture).items():
        if blocks and name in blocks:
            writer.add_tensor(name, blocks[name], raw_dtype=quantized)
        elif values.ndim == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of a transformers checkpoint."""
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ggml in renamed.items():
        name = name.replace(theirs, ggml)
    return name


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors in GGUF's names and layout; Llama's q and k rows pair neighbours there."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if architecture in ("llama", "mistral3") and ("q_proj" in name or "k_proj" in name):
            head_dim = model.model.layers[0].self_attn.head_dim
            halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        tensors[gguf_name(name)] = array
    return tensors
