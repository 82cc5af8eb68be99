"""Whole requests of the built-in model: rates, what is not the model, prefix caching, start."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benches.peers import servers

from miniinfer import LLM, SamplingParams
from miniinfer.cpu.linear import profile_kernels


def random_prompts(source: random.Random, count: int, tokens: int) -> list[Any]:
    """Prompts that no cache holds."""
    return [
        {"prompt_token_ids": [source.randrange(100, 40_000) for _ in range(tokens)]}
        for _ in range(count)
    ]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def measure_requests(llm: LLM) -> dict[str, float]:
    """Output tokens a second with c clients, 128 tokens in and 64 out, prefill included."""
    source = random.Random(0)
    rates = {}
    for clients in (1, 8, 32):
        runs = []
        for _ in range(3):
            prompts = random_prompts(source, clients, 128)
            start = time.perf_counter()
            llm.generate(prompts, greedy(64))
            runs.append(64 * clients / (time.perf_counter() - start))
        rates[f"{clients} clients"] = max(runs)
    return rates


def measure_phases(llm: LLM) -> dict[str, float]:
    """Tokens a second of a prompt of 512 tokens, and of one stream's decoding behind it."""
    source = random.Random(1)

    def seconds(max_tokens: int) -> float:
        prompts = random_prompts(source, 1, 512)
        start = time.perf_counter()
        llm.generate(prompts, greedy(max_tokens))
        return time.perf_counter() - start

    prefill = min(seconds(1) for _ in range(3))
    whole = min(seconds(65) for _ in range(3))
    return {"prefill 512": 512 / prefill, "decode one stream": 64 / (whole - prefill)}


def measure_profile(llm: LLM, batch: int = 32) -> dict[str, float]:
    """Where the time of a batch's decoding goes, as shares of it; the quickest of three runs.

    `step_products`, `step_attention`, `step_inputs` and `step_heads` as in `profile_kernels`,
    `step_model` what else the forward pass and the head take, `step_rest` what is not the model:
    scheduling, sampling, text, Python. `overhead_share_32` is all but products and attention.
    """
    prompts = random_prompts(random.Random(2), batch, 16)
    quickest, shares = math.inf, {}
    for _ in range(3):
        profile_kernels(True)
        with model_clock(llm) as spent:
            start = time.perf_counter()
            llm.generate(prompts, greedy(64))
            elapsed = time.perf_counter() - start
        parts = profile_kernels(False)
        if elapsed < quickest:
            quickest = elapsed
            shares = {f"step_{name}": seconds / elapsed for name, seconds in parts.items()}
            shares["step_model"] = (spent[0] - sum(parts.values())) / elapsed
            shares["step_rest"] = 1 - spent[0] / elapsed
    overhead = 1 - shares["step_products"] - shares["step_attention"]
    return shares | {"overhead_share_32": overhead}


@contextlib.contextmanager
def model_clock(llm: LLM) -> Iterator[list[float]]:
    """Counts the seconds inside the model's forward pass and its head."""
    model: Any = llm.llm_engine.engine.model
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    names = ("forward", "logits")
    for name in names:
        setattr(model, name, timed(getattr(model, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(model, name)


def measure_prefix_caching(threads: int | None) -> dict[str, float]:
    """What the cache costs where nothing is in it, and the time to the first token at 90% hits.

    `prefix_cost_0` is the share of time that it adds to prompts of 512 tokens, `prefix_ttft_90` the
    time of a prompt of 1,000 tokens of which 900 are cached over that of one of which none is.
    """
    source = random.Random(3)
    engines = [
        LLM(num_kv_blocks=2048, threads=threads, enable_prefix_caching=enabled)
        for enabled in (True, False)
    ]

    def seconds(llm: LLM, prompt: Any) -> float:
        start = time.perf_counter()
        llm.generate(prompt, greedy(1))
        return time.perf_counter() - start

    with contextlib.ExitStack() as stack:
        for llm in engines:
            stack.enter_context(llm)
            seconds(llm, random_prompts(source, 1, 512))
        costs, hits = [], []
        for _ in range(9):
            pair = [seconds(llm, random_prompts(source, 4, 512)) for llm in engines]
            costs.append(pair[0] / pair[1] - 1)
        for _ in range(5):
            (cold,) = random_prompts(source, 1, 1000)
            (other,) = random_prompts(source, 1, 100)
            warm = cold["prompt_token_ids"][:900] + other["prompt_token_ids"]
            whole = seconds(engines[0], [cold])
            hits.append(seconds(engines[0], [{"prompt_token_ids": warm}]) / whole)
    return {
        "prefix_cost_0": statistics.median(costs),
        "prefix_ttft_90": statistics.median(hits),
    }


def measure_start(rounds: int = 7) -> dict[str, float]:
    """Seconds from the shell until `import torch` is done, and until the server is ready; its size.

    In turns; medians.
    """
    imports, ready, memory = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - start)
        server = servers.ours("start")
        server.start()
        ready.append(server.ready_seconds)
        memory.append(server.resident_mb())
        server.stop()
    return {
        "import_torch_s": statistics.median(imports),
        "ready_s": statistics.median(ready),
        "rss_mb": statistics.median(memory),
    }
