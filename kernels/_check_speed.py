"""How fast the kernels are, and models over them, beside what the card could do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from miniinfer.backends import Backend
from miniinfer.model.batch import ForwardBatch
from miniinfer.model.config import ModelConfig
from miniinfer.model.kv_cache import KVCache
from miniinfer.model.llama import LlamaModel

from ._check_accuracy import sampling_batch
from ._check_result import Result, Sizes
from ._measure import attention_case, cache_bytes, seconds
from .paged_attention import paged_attention
from .rms_norm import add_rms_norm
from .sample import sample

_WANTED_SHARE = 0.8
"""Of the card's copy speed, for decodes."""

_BLOCK_SIZE = 16


def _model(layers: int, hidden: int, inner: int, heads: tuple[int, int], vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=8192,
        sliding_windows=(None,) * layers,
    )


MODELS = {
    "0.6B": _model(28, 1024, 3072, (16, 8), 151_936),
    "8B": _model(32, 4096, 14_336, (32, 8), 128_256),
    "tiny": _model(1, 64, 96, (2, 1), 300),
}
"""Shapes of Qwen3-0.6B and Llama-3-8B, and one for the interpreter."""


def copy_speed(sizes: Sizes, device: torch.device) -> float:
    """Bytes a second, read and written together."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / seconds(lambda: target.copy_(source), device)


def check_decode(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """The decode attention's share of the copy speed."""
    speed = copy_speed(sizes, device)
    yield Result("copy", f"{speed / 1e9:.0f} GB/s", value=speed / 1e9, unit="GB/s")
    for kind, fp8, splits in (("bf16", False, None), ("fp8", True, None), ("bf16", False, 1)):
        case = attention_case(
            device,
            requests=[(1, sizes.decode_context)] * sizes.decodes,
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype=torch.bfloat16,
            fp8=fp8,
        )
        options = {**case, "num_splits": splits}
        taken = seconds(functools.partial(paged_attention, **options), device)
        share = cache_bytes(case) / taken / speed
        words = f"{cache_bytes(case) / taken / 1e9:.0f} GB/s, {share:.0%} of a copy"
        name = f"decode {sizes.decodes} x {sizes.decode_context} {kind} splits {splits or 'auto'}"
        # Without a GPU the time is the interpreter's. Fewer bytes hide less of the rest.
        judged = device.type == "cuda" and kind == "bf16" and splits is None
        yield Result(name, words, not judged or share >= _WANTED_SHARE, share, "of a copy")


def check_prefill(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """The prefill attention's floating-point operations."""
    length = sizes.prefill
    case = attention_case(
        device,
        requests=[(length, length)],
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
    )
    taken = seconds(lambda: paged_attention(**case), device)
    # Two products, two operations each, over half of the square.
    speed = 2 * length * length * 32 * 128 / taken / 1e12
    yield Result(f"prefill {length}", f"{speed:.0f} TFLOP/s", value=speed, unit="TFLOP/s")


def check_other_kernels(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """RMSNorm's bytes, and the sampler's time."""
    x = torch.randn(sizes.rows, sizes.width, device=device).bfloat16()
    residual = torch.randn_like(x)
    taken = seconds(lambda: add_rms_norm(x, residual, x[0], 1e-5), device)
    speed = 4 * x.numel() * x.itemsize / taken / 1e9
    yield Result("add_rms_norm", f"{speed:.0f} GB/s", value=speed, unit="GB/s")
    for rows in (1, sizes.samples):
        logits = torch.randn(rows, sizes.vocab, device=device) * 3
        for name, changes in (
            ("filters", {"num_logprobs": -1}),
            ("logprobs", {}),
            ("greedy", {"num_logprobs": -1, "all_greedy": True}),
        ):
            batch = sampling_batch(rows, device, **changes)
            # The first row is greedy in that batch.
            batch.temperature = batch.temperature.clamp(min=0.7)
            taken = seconds(functools.partial(sample, logits, batch), device)
            found = f"{taken * 1e6:.0f} us"
            yield Result(f"sample {rows} rows, {name}", found, value=taken * 1e6, unit="us")


def check_models(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Tokens a second of decode steps of models with random weights, launched and replayed."""
    for name in sizes.models:
        config = MODELS[name]
        model = LlamaModel(config, torch.bfloat16, device)
        for slot in model.weights.slots().values():
            slot.target.normal_(std=0.02)
        context = sizes.decode_context
        blocks = -(-context // _BLOCK_SIZE)
        cache = KVCache(
            config.num_layers,
            blocks * sizes.decodes,
            _BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            device,
        )
        for tensor in cache.keys + cache.values:
            tensor.normal_()
        Backend("triton", "its kernels are measured").attach(model, cache)
        batch = decode_batch(sizes.decodes, context, blocks, device)

        def step(model: LlamaModel = model, batch: ForwardBatch = batch) -> Any:
            return model.logits(model.forward(batch), batch.logits_index)

        runs = {"launched": step}
        if device.type == "cuda":
            runs["replayed"] = _captured(step)
        for way, run in runs.items():
            taken = seconds(run, device, repeats=10)
            speed = sizes.decodes / taken
            found = f"{speed:.0f} tokens/s, {taken * 1e3:.2f} ms a step"
            label = f"decode step {name}, {sizes.decodes} x {context}, {way}"
            yield Result(label, found, value=speed, unit="tokens/s")


def _captured(step: Any) -> Any:
    """The step as a CUDA graph, which leaves out the time of launching."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def decode_batch(count: int, context: int, blocks: int, device: torch.device) -> ForwardBatch:
    """One token more for `count` requests of `context` tokens each, in blocks of their own."""
    table = torch.randperm(count * blocks, device=device).int().view(count, blocks)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    last = table[:, (context - 1) // _BLOCK_SIZE].long() * _BLOCK_SIZE
    return ForwardBatch(
        token_ids=torch.arange(count, **ints),
        positions=torch.full((count,), context - 1, **ints),
        slot_mapping=last + (context - 1) % _BLOCK_SIZE,
        query_start=torch.arange(count + 1, **ints),
        seq_lens=torch.full((count,), context, **ints),
        rows=torch.arange(count, **ints),
        block_table=table,
        logits_index=torch.arange(count, **ints),
        num_decodes=count,
        max_query_len=1,
        max_seq_len=context,
        query_start_host=np.arange(count + 1, dtype=np.int32),
        seq_lens_host=np.full(count, context, np.int32),
    )


CHECKS = (check_decode, check_prefill, check_other_kernels, check_models)
