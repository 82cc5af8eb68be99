"""Inputs at the sizes of real models, and the time that something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._dispatch import FP8


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The median time of `run`, after one call that may compile; without a GPU, of one call."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    run()
    # What lies in a cache from the last run would make the next one look fast.
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats):
        flush.zero_()
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's own
        events[0].record()
        run()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3)
    return float(statistics.median(times))


def attention_case(
    device: torch.device,
    *,
    requests: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool = False,
    block_size: int = 16,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `paged_attention` for pairs of queries and context, in shuffled blocks."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // block_size) for _, length in requests]
    blocks = torch.randperm(sum(counts), generator=generator, device=device).int()
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32, device=device)
    for row, part in enumerate(torch.split(blocks, counts)):
        table[row, : len(part)] = part

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    cache = (len(blocks), block_size, kv_heads, head_dim)
    queries = [count for count, _ in requests]
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    caches = [random(*cache).to(FP8) if fp8 else random(*cache) for _ in range(2)]
    scale = torch.full((kv_heads,), 0.75, device=device) if fp8 else None
    return {
        "query": random(sum(queries), heads, head_dim),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "query_start": torch.tensor([0, *queries], **ints).cumsum(0, dtype=torch.int32),
        "seq_lens": torch.tensor([length for _, length in requests], **ints),
        "rows": torch.arange(len(requests), **ints),
        "block_table": table,
        "max_query_len": max(queries),
        "max_seq_len": max(length for _, length in requests),
        "key_scale": scale,
        "value_scale": scale,
    }


def cache_bytes(case: dict[str, Any]) -> int:
    """Bytes of keys and values that the attention of a case must read."""
    keys: Tensor = case["key_cache"]
    return 2 * int(case["seq_lens"].sum()) * keys[0, 0].numel() * keys.itemsize
