"""The CPU backend's speed: kernels, prefill, decode, and whole requests of the built-in model.

`make bench-cpu` prints the figures and writes them to benches/results/cpu.json; `--perplexity`
compares the quality of quantised weights with that of the dequantised ones instead.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miniinfer import LLM, SamplingParams
from miniinfer.cpu.linear import QuantLinear, kernel_isa, set_kernel_threads
from miniinfer.fetch import ensure_builtin
from miniinfer.gguf_file import GGMLType
from miniinfer.model import KVCache, LlamaModel, load_model
from miniinfer.model.batch import ForwardBatch
from miniinfer.runner import attach_attention
from miniinfer.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "cpu.json"
ROWS = (1, 8, 32, 128, 512)
CHUNK = 512


def best(run: Callable[[], object], seconds: float = 1.0) -> float:
    """The shortest of repeated runs, in seconds: what other processes do to it only adds."""
    shortest, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or shortest == math.inf:
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes together."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source))


def layer_shapes() -> list[tuple[int, int]]:
    """Rows and columns of the built-in model's matrices, its head aside."""
    return [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30


def as_blocks(kind: GGMLType, values: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Type, bits and bytes for `QuantLinear`; Q4_1 and Q8_0 by the quantiser of the kernels."""
    if kind is GGMLType.BF16:
        return kind, 0, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    bits = {GGMLType.Q4_1: 4, GGMLType.Q8_0: 8, GGMLType.F32: 0}[kind]
    return GGMLType.F32, bits, values.view(np.uint8)


def measure_kernels(bandwidth: float) -> dict[str, Any]:
    """Milliseconds for all matrices of the layers, by type and rows, beside torch's float32."""
    generator = np.random.default_rng(0)
    table: dict[str, Any] = {}
    for kind in (GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.BF16, GGMLType.F32):
        layers = []
        for rows, columns in layer_shapes():
            values = generator.standard_normal((rows, columns), np.float32)
            layers.append(QuantLinear([(*as_blocks(kind, values), rows, columns)]))
        floor = sum(layer.num_bytes for layer in layers) / bandwidth
        table[kind.name] = {"roofline_ms": 1000 * floor} | _by_rows(_forward(layers))
    weights = [torch.randn(shape) for shape in layer_shapes()]
    table["torch float32"] = _by_rows(
        lambda count: [
            torch.nn.functional.linear(torch.ones(count, weight.shape[1]), weight)
            for weight in weights
        ]
    )
    return table


def _forward(layers: list[QuantLinear]) -> Callable[[int], object]:
    def run(count: int) -> None:
        for layer in layers:
            layer.forward(torch.ones(count, layer.columns), torch.empty(count, layer.rows))

    return run


def _by_rows(run: Callable[[int], object]) -> dict[str, float]:
    return {str(rows): 1000 * best(lambda rows=rows: run(rows)) for rows in ROWS}


def measure_requests(llm: LLM) -> dict[str, float]:
    """Output tokens a second with c clients, 128 tokens in and 64 out, prefill included."""
    source = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    rates = {}
    for clients in (1, 8, 32):
        runs = []
        for _ in range(3):
            prompts: Any = [
                {"prompt_token_ids": [source.randrange(100, 40_000) for _ in range(128)]}
                for _ in range(clients)
            ]
            start = time.perf_counter()
            llm.generate(prompts, params)
            runs.append(64 * clients / (time.perf_counter() - start))
        rates[f"{clients} clients"] = max(runs)
    return rates


def measure_phases(llm: LLM) -> dict[str, float]:
    """Tokens a second of a prompt of 512 tokens, and of one stream's decoding behind it."""
    source = random.Random(1)

    def seconds(max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": [source.randrange(100, 40_000) for _ in range(512)]}
        start = time.perf_counter()
        llm.generate([prompt], params)
        return time.perf_counter() - start

    prefill = min(seconds(1) for _ in range(3))
    whole = min(seconds(65) for _ in range(3))
    return {"prefill 512": 512 / prefill, "decode one stream": 64 / (whole - prefill)}


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


def compare_perplexity(num_tokens: int) -> dict[str, float]:
    """Perplexity of the built-in model on the text of Python's own manual, by packing."""
    path = ensure_builtin(progress=False)
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = Tokenizer.from_gguf(path).encode(text[: 8 * num_tokens])[:num_tokens]
    packings: Any = (None, "stored", "int8", "int4")
    return {
        packing or "float32": perplexity(load_model(path, packing=packing, progress=False), tokens)
        for packing in packings
    }


def show(title: str, figures: dict[str, Any]) -> None:
    print(title)
    for name, value in figures.items():
        if isinstance(value, dict):
            cells = "  ".join(f"{key}: {number:.2f}" for key, number in value.items())
            print(f"  {name:<18} {cells}")
        else:
            print(f"  {name:<18} {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perplexity", action="store_true", help="measure quality, not speed")
    parser.add_argument("--tokens", type=int, default=20_480, help="tokens of text for that")
    parser.add_argument("--threads", type=int, help="threads (default: torch's choice)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    set_kernel_threads(torch.get_num_threads())
    if arguments.perplexity:
        show("perplexity", compare_perplexity(arguments.tokens))
        return
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {
        "isa": kernel_isa(),
        "threads": torch.get_num_threads(),
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "kernels_ms": measure_kernels(bandwidth),
    }
    print(f"{results['isa']}, {results['threads']} threads, copy {bandwidth / 1e9:.1f} GB/s")
    show("milliseconds for the layers' matrices, by rows", results["kernels_ms"])
    with LLM(num_kv_blocks=2048, threads=arguments.threads) as llm:
        results["tokens_per_second"] = measure_requests(llm) | measure_phases(llm)
    show("tokens a second", results["tokens_per_second"])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
