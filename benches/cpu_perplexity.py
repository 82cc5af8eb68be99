"""The quality of the built-in model's quantised weights beside that of the dequantised ones."""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
from typing import Any

import numpy as np
import torch

from miniinfer.fetch import ensure_builtin
from miniinfer.model import KVCache, LlamaModel, load_model
from miniinfer.model.batch import ForwardBatch
from miniinfer.runner import attach_attention
from miniinfer.tokenizer import Tokenizer

CHUNK = 512
TOKENS = 20_480
PACKINGS = (None, "stored", "int8", "int4")


def perplexity(model: LlamaModel, tokens: list[int]) -> float:
    """e to the mean loss of each token in chunks of 512, the first of a chunk aside."""
    config, losses = model.config, []
    blocks = CHUNK // 16
    cache = KVCache(
        config.num_layers, blocks, 16, config.num_kv_heads, config.head_dim, torch.float32, "cpu"
    )
    attach_attention(model, cache)
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        chunk = torch.tensor(tokens[start : start + CHUNK], dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=chunk,
            positions=torch.arange(CHUNK, dtype=torch.int32),
            slot_mapping=torch.arange(CHUNK),
            query_start=torch.tensor([0, CHUNK], dtype=torch.int32),
            seq_lens=torch.tensor([CHUNK], dtype=torch.int32),
            rows=torch.zeros(1, dtype=torch.int32),
            block_table=torch.arange(blocks, dtype=torch.int32)[None],
            logits_index=torch.arange(CHUNK, dtype=torch.int32),
            num_decodes=0,
            max_query_len=CHUNK,
            max_seq_len=CHUNK,
            query_start_host=np.array([0, CHUNK], np.int32),
            seq_lens_host=np.array([CHUNK], np.int32),
        )
        logits = model.logits(model.forward(batch), batch.logits_index)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], chunk[1:].long()).item())
    return math.exp(statistics.fmean(losses))


def compare_perplexity(num_tokens: int, packings: Any = PACKINGS) -> dict[str, float]:
    """Perplexity of the built-in model on the text of Python's own manual, by packing."""
    path = ensure_builtin(progress=False)
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = Tokenizer.from_gguf(path).encode(text[: 8 * num_tokens])[:num_tokens]
    return {
        packing or "float32": perplexity(load_model(path, packing=packing, progress=False), tokens)
        for packing in packings
    }
