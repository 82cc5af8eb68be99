"""The CPU backend's speed: kernels, requests of the built-in model, and other engines beside it.

`make bench-cpu` prints the figures, writes them to `benches/results/cpu.json` and the table to
`benches/README.md`. Peers are measured if `python benches/peers/install.py` has installed them.
`--perplexity` compares the quality of quantised weights with that of the dequantised ones instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benches import report
from benches.cpu_engine import (
    measure_phases,
    measure_prefix_caching,
    measure_profile,
    measure_requests,
    measure_start,
)
from benches.cpu_figures import readme_table
from benches.cpu_kernels import (
    ROWS,
    arithmetic_peaks,
    copy_bandwidth,
    layer_shapes,
    measure_kernels,
)
from benches.cpu_perplexity import TOKENS, compare_perplexity
from benches.peers import compare

from miniinfer import LLM
from miniinfer.cpu.linear import kernel_isa, set_kernel_threads

PARTS = ("kernels", "engine", "start", "perplexity", "peers")


def show(title: str, figures: dict[str, Any]) -> None:
    print(title)
    for name, value in figures.items():
        if isinstance(value, dict):
            cells = "  ".join(f"{key}: {number:.2f}" for key, number in value.items())
            print(f"  {name:<18} {cells}")
        else:
            print(f"  {name:<18} {value:.2f}", flush=True)


def kernel_figures(threads: int) -> dict[str, Any]:
    """The machine's limits, and milliseconds by type and rows with the least that they allow."""
    bandwidth, peaks = copy_bandwidth(), arithmetic_peaks(threads)
    figures: dict[str, Any] = {"copy_bandwidth_gb_s": bandwidth / 1e9}
    if peaks is not None:
        figures |= {
            "float32_peak_gflops": peaks.float32 / 1e9,
            "int8_peak_gops": peaks.int8 / 1e9,
            "bfloat16_peak_gflops": peaks.bfloat16 / 1e9,
        }
    table = measure_kernels(bandwidth)
    show("milliseconds for the layers' matrices, by rows", table)
    for kind, cells in table.items():
        if "roofline_ms" not in cells:
            continue
        peak = 0.0 if peaks is None else peaks.of(kind)
        for rows in ROWS:
            compute = 1000 * rows * operations() / peak if peak else 0.0
            figures[f"kernels_ms_{kind}_{rows}"] = cells[str(rows)]
            figures[f"kernels_floor_ms_{kind}_{rows}"] = max(cells["roofline_ms"], compute)
    return figures


def operations() -> int:
    """Of one row through the layers' matrices."""
    return sum(2 * rows * columns for rows, columns in layer_shapes())


def engine_figures(threads: int | None) -> dict[str, Any]:
    with LLM(num_kv_blocks=2048, threads=threads) as llm:
        rates, phases = measure_requests(llm), measure_phases(llm)
        profile = measure_profile(llm)
    show("tokens a second, without a server", rates | phases)
    figures = {f"offline_tok_s_{name.split()[0]}": rate for name, rate in rates.items()}
    figures |= {
        "prefill_tok_s": phases["prefill 512"],
        "decode_tok_s": phases["decode one stream"],
    }
    return figures | profile | measure_prefix_caching(threads)


def perplexity_figures(tokens: int) -> dict[str, Any]:
    found = compare_perplexity(tokens, (None, "stored"))
    return {"perplexity_ratio": found["stored"] / found["float32"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perplexity", action="store_true", help="measure quality, not speed")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of text for that")
    parser.add_argument("--threads", type=int, help="threads (default: torch's choice)")
    parser.add_argument("--rounds", type=int, default=3, help="of the turns with other engines")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    threads = torch.get_num_threads()
    set_kernel_threads(threads)
    if arguments.perplexity:
        show("perplexity", compare_perplexity(arguments.tokens))
        return
    print(f"{kernel_isa()}, {threads} threads")
    measures = {
        "kernels": lambda: kernel_figures(threads),
        "engine": lambda: engine_figures(arguments.threads),
        "start": measure_start,
        "perplexity": lambda: perplexity_figures(arguments.tokens),
        "peers": lambda: compare.run(arguments.rounds),
    }
    # What is not measured now stands as it was measured before.
    figures: dict[str, Any] = report.read("cpu") | {
        "machine": report.machine(),
        "isa": kernel_isa(),
        "threads": threads,
    }
    for part in arguments.parts:
        found = measures[part]()
        show(part, found)
        figures |= found
    figures["load_average"] = os.getloadavg()[0]
    report.write("cpu", figures, readme_table(figures))


if __name__ == "__main__":
    main()
