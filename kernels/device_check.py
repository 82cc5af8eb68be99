"""Whether the kernels are right and fast on the GPU of this machine, in one command.

`python -m miniinfer.kernels.device_check --json report.json` compares every kernel with a reference
in higher precision, measures the attention against the card's copy speed, and decodes with models
of random weights; it prints a table, and exits with 1 if anything misses. `--cpu-smoke` goes
through the same at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import _check_accuracy, _check_speed
from ._check_result import Result, Sizes

DEVICE_SIZES = Sizes(
    head_dims=(128, 64, 80, 96, 256),
    context=1500,
    copy_bytes=1 << 31,
    decodes=32,
    decode_context=4096,
    prefill=4096,
    rows=4096,
    width=8192,
    vocab=151_936,
    samples=64,
    models=("0.6B", "8B"),
)
SMOKE_SIZES = Sizes(
    head_dims=(64,),
    context=40,
    copy_bytes=1 << 16,
    decodes=2,
    decode_context=64,
    prefill=32,
    rows=3,
    width=64,
    vocab=300,
    samples=4,
    models=("tiny",),
)


def run(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Every check; one that fails with an exception is a result, too."""
    for check in (*_check_accuracy.CHECKS, *_check_speed.CHECKS):
        yield from _guarded(check, sizes, device)


def _guarded(
    check: Callable[[Sizes, torch.device], Iterator[Result]], sizes: Sizes, device: torch.device
) -> Iterator[Result]:
    try:
        yield from check(sizes, device)
    except Exception as error:  # whatever a compiler or driver raises, the other checks go on
        lines = str(error).splitlines() or [""]
        yield Result(check.__name__, f"{type(error).__name__}: {lines[0][:200]}", ok=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and what runs on it."""
    import triton

    from ._launch import traits_of

    return {
        "device": dataclasses.asdict(traits_of(device)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    """Check, print, write; 1 if anything missed."""
    parser = argparse.ArgumentParser(description="Check the kernels on the GPU of this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--cpu-smoke", action="store_true", help="small, in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.cpu_smoke:
        # Read when Triton is imported, which nothing has done yet.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --cpu-smoke needs none")
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    start = time.perf_counter()
    results = []
    report = describe(device)
    print(" ".join(f"{name}={value}" for name, value in report.items()))
    for result in run(SMOKE_SIZES if options.cpu_smoke else DEVICE_SIZES, device):
        results.append(result)
        print(result.line(), flush=True)
    report["seconds"] = round(time.perf_counter() - start, 1)
    report["results"] = [dataclasses.asdict(result) for result in results]
    missed = sum(not result.ok for result in results)
    print(f"{len(results)} checks, {missed} missed, {report['seconds']} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
