"""The CPU backend's figures: what each must be, how far it is from what the machine could do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miniinfer.fetch import ensure_builtin

CLIENTS = (1, 8, 32)
_PROMPT, _OUTPUT = 128, 64
# Of the built-in model: weights of the layers and of the head, and what a token adds to the cache.
_LAYER_WEIGHTS = 30 * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536)
_HEAD_WEIGHTS = 49_152 * 576
_KV_VALUES = 30 * 2 * 3 * 64

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A row of the table."""

    title: str
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        if self.at_least is not None:
            return f">= {number(self.at_least)}"
        return "" if self.at_most is None else f"<= {number(self.at_most)}"


def targets(figures: Figures) -> dict[str, Target]:
    """The rows, in their order; that of the start depends on another figure."""
    rows: dict[str, Target] = {}
    for clients in CLIENTS:
        rows[f"gguf_vs_vllm_{clients}"] = Target(f"quantised over vLLM, {_clients(clients)}", 4)
    for clients in CLIENTS:
        title = f"time to first token over vLLM's, {_clients(clients)}"
        rows[f"ttft_vs_vllm_{clients}"] = Target(title, at_most=0.35)
    rows |= {
        "decode_vs_llama": Target("decode of one stream over llama-bench tg64", 2),
        "prefill_vs_llama": Target("prefill of 512 over llama-bench pp512", 5),
        "prefill_vs_transformers": Target("prefill of 512 over transformers in float32", 2),
        "server32_vs_llama": Target("32 clients over llama.cpp's server", 8),
    }
    for clients in CLIENTS:
        rows[f"plain_vs_vllm_{clients}"] = Target(f"plain over vLLM, {_clients(clients)}", 1.3)
    for clients in CLIENTS:
        title = f"plain over transformers, batch of {clients}"
        rows[f"vs_transformers_{clients}"] = Target(title, 1.5)
    for clients in CLIENTS:
        rows[f"tok_s_gguf_{clients}"] = Target(f"output tokens a second, {_clients(clients)}")
    for clients in CLIENTS:
        rows[f"ttft_ms_gguf_{clients}"] = Target(f"time to first token, ms, {_clients(clients)}")
    for clients in CLIENTS:
        title = f"output tokens a second in bfloat16, {_clients(clients)}"
        rows[f"tok_s_plain-bfloat16_{clients}"] = Target(title)
    rows |= {
        "decode_tok_s": Target("decode of one stream behind 512 tokens, tokens a second"),
        "prefill_tok_s": Target("prefill of 512, tokens a second"),
        "perplexity_ratio": Target("perplexity over the dequantised model's", at_most=1.01),
        "overhead_share_32": Target("share of a step of 32 besides the next two", at_most=0.15),
        "step_products": Target("the step's share in products with weights"),
        "step_attention": Target("the step's share in attention"),
        "step_inputs": Target("in what comes before products: norms, SiLU, rounding to 8 bits"),
        "step_heads": Target("in rotary embedding and new keys and values"),
        "step_model": Target("in what else the forward pass does"),
        "step_rest": Target("in scheduling, sampling, text, Python"),
        "prefix_cost_0": Target("what prefix caching adds where nothing hits", at_most=0.01),
        "prefix_ttft_90": Target("time to first token at 90% hits over none", at_most=0.2),
        "import_torch_s": Target("import torch, s"),
        "ready_s": Target("server ready, s", at_most=figures.get("import_torch_s", 0) + 1.5),
        "rss_mb": Target("resident memory of the server, MB"),
    }
    for name in figures:
        if name.startswith("kernels_ms_"):
            kind, _, rows_of = name.removeprefix("kernels_ms_").rpartition("_")
            rows[name] = Target(f"the layers' matrices in {kind}, {rows_of} rows, ms")
    return {name: row for name, row in rows.items() if name in figures}


@dataclass(frozen=True)
class _Limits:
    """Bytes and operations a second of a machine, and bytes of weights; times in seconds."""

    bandwidth: float
    peak: float
    weights: int

    def step(self, requests: int, context: int) -> float:
        read = self.weights + 2 * requests * context * _KV_VALUES
        operations = 2 * requests * (_LAYER_WEIGHTS + _HEAD_WEIGHTS)
        return max(read / self.bandwidth, operations / self.peak)

    def prefill(self, tokens: int) -> float:
        operations = 2 * (tokens * _LAYER_WEIGHTS + _HEAD_WEIGHTS)
        return max(self.weights / self.bandwidth, operations / self.peak)

    def rate(self, clients: int) -> float:
        """Output tokens a second of the load."""
        decoding = (_OUTPUT - 1) * self.step(clients, _PROMPT + _OUTPUT // 2)
        return clients * _OUTPUT / (self.prefill(clients * _PROMPT) + decoding)


def rooflines(figures: Figures) -> dict[str, float]:
    """The best value that the machine allows, by the name of the figure.

    Time is that to read weights and keys and values at the bandwidth of a copy, or that of the
    arithmetic at its measured peak, whichever is longer.
    """
    bandwidth = figures.get("copy_bandwidth_gb_s", 0) * 1e9
    float32 = figures.get("float32_peak_gflops", 0)
    int8 = 1e9 * (figures.get("int8_peak_gops") or float32)
    bfloat16 = 1e9 * (figures.get("bfloat16_peak_gflops") or float32)
    if not bandwidth or not int8:
        return {}
    quantised = _Limits(bandwidth, int8, ensure_builtin(progress=False).stat().st_size)
    plain = _Limits(bandwidth, bfloat16, 2 * (_LAYER_WEIGHTS + _HEAD_WEIGHTS))
    found = {
        "decode_tok_s": 1 / quantised.step(1, 512 + 32),
        "prefill_tok_s": 512 / quantised.prefill(512),
    }
    for clients in CLIENTS:
        found[f"tok_s_gguf_{clients}"] = quantised.rate(clients)
        # The median's: behind half of the prompts, which come at once.
        before = (clients + 1) // 2
        found[f"ttft_ms_gguf_{clients}"] = 1000 * quantised.prefill(before * _PROMPT)
        if bfloat16:
            found[f"tok_s_plain-bfloat16_{clients}"] = plain.rate(clients)
    for name in figures:
        if name.startswith("kernels_ms_"):
            found[name] = figures[name.replace("kernels_ms_", "kernels_floor_ms_")]
    return found


def readme_table(figures: Figures) -> str:
    """The table of `README.md`."""
    floors = rooflines(figures)
    lines = [
        "| figure | must be | measured | at most possible here | reached |",
        "|---|---|---|---|---|",
    ]
    for name, target in targets(figures).items():
        cells = [target.title, str(target), number(figures[name]), "", ""]
        if name in floors:
            share = figures[name] / floors[name]
            rate = "tok_s" in name
            cells[3:] = [number(floors[name]), f"{100 * (share if rate else 1 / share):.0f}%"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _clients(count: int) -> str:
    return "one client" if count == 1 else f"{count} clients"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
