"""The largest step that an engine may have to compute, to see what memory it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .backends import Backend
from .model.batch import ForwardBatch
from .model.kv_cache import KVCache
from .model.llama import LlamaModel
from .sampling import SamplingBatch

__all__ = ["longest_batch", "run_largest_step"]


def longest_batch(
    device: torch.device, *, num_tokens: int, num_samples: int, max_len: int, block_size: int
) -> ForwardBatch:
    """Prefill chunks of `num_tokens` together, each the end of a context of `max_len` tokens.

    Every position lies in block 0, so that a cache of one block will do. `num_samples` tokens need
    their logits.
    """
    chunks = [max_len] * (num_tokens // max_len)
    if num_tokens % max_len:
        chunks.append(num_tokens % max_len)
    positions = np.concatenate([np.arange(max_len - chunk, max_len) for chunk in chunks])
    starts = np.cumsum([0, *chunks]).astype(np.int32)
    seq_lens = np.full(len(chunks), max_len, np.int32)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, **ints),
        positions=torch.from_numpy(positions).to(**ints),
        slot_mapping=torch.from_numpy(positions % block_size).to(device),
        query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        rows=torch.zeros(len(chunks), **ints),
        block_table=torch.zeros(1, -(-max_len // block_size), **ints),
        logits_index=torch.zeros(num_samples, **ints),
        num_decodes=0,
        max_query_len=max(chunks),
        max_seq_len=max_len,
        query_start_host=starts,
        seq_lens_host=seq_lens,
    )


@torch.inference_mode()
def run_largest_step(
    model: LlamaModel,
    backend: Backend,
    *,
    num_tokens: int,
    num_samples: int,
    max_len: int,
    block_size: int,
    vocab_size: int,
    kv_dtype: torch.dtype,
) -> None:
    """Compute `longest_batch` and sample with every filter and log probabilities on."""
    config = model.config
    sizes = (config.num_layers, 1, block_size, config.num_kv_heads, config.head_dim)
    backend.attach(model, KVCache(*sizes, kv_dtype, model.device))
    batch = longest_batch(
        model.device,
        num_tokens=num_tokens,
        num_samples=num_samples,
        max_len=max_len,
        block_size=block_size,
    )
    logits = model.logits(model.forward(batch), batch.logits_index)
    # What lay in the cache may be no number; the sampler then has other, and less, work.
    backend.sample(logits.zero_(), _all_filters(num_samples, model.device), vocab_size)


def _all_filters(rows: int, device: torch.device) -> SamplingBatch:
    ones = torch.ones(rows, device=device)
    none = torch.empty(0, device=device)
    return SamplingBatch(
        temperature=ones,
        top_k=(ones * 50).int(),
        top_p=ones * 0.9,
        min_p=ones * 0.01,
        uniform=ones * 0.5,
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        edit_sample=none.int(),
        edit_token=none.int(),
        edit_repetition=none,
        edit_bias=none,
        num_logprobs=20,
    )
