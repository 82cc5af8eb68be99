"""Whether the kernels, and engines over them, are right and fast on the GPU of this machine.

`python -m miniinfer.kernels.device_check --json report.json` compares every kernel with a reference
in higher precision, measures the attention against the card's copy speed, and runs engines with
random weights beside transformers and vLLM, if installed; it prints a table, and exits with 1 if
anything misses. Each part has a process of its own: one that crashes or hangs costs its own results
alone. `--dry-run` goes through the same at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from . import _check_accuracy, _check_engine, _check_speed
from ._check_result import Result, Sizes

Check: TypeAlias = Callable[[Sizes, torch.device], Iterator[Result]]

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
    prompt=512,
    new_tokens=64,
    seconds=340.0,
    part_seconds=120.0,
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
    prompt=5,
    new_tokens=3,
    seconds=1500.0,
    part_seconds=900.0,
)

_MODULE = "miniinfer.kernels.device_check"
_LEAST_SECONDS = 10.0
"""With less left, a part is not begun."""


def parts(sizes: Sizes) -> dict[str, tuple[Check, ...]]:
    """What is checked, by the name of its process."""
    found: dict[str, tuple[Check, ...]] = {
        "accuracy": _check_accuracy.CHECKS,
        "tokens": (_check_engine.check_tokens,),
        "speed": _check_speed.CHECKS,
    }
    for kind in ("engine", "transformers", "vllm"):
        check = getattr(_check_engine, f"check_{kind}")
        for name in sizes.models:
            found[f"{kind} {name}"] = (functools.partial(check, name=name),)
    return found


def guarded(check: Check, sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """The results of a check; one that fails with an exception is a result, too."""
    try:
        yield from check(sizes, device)
    except Exception as error:  # whatever a compiler or driver raises, the other checks go on
        lines = str(error).splitlines() or [""]
        name = getattr(check, "func", check).__name__
        yield Result(name, f"{type(error).__name__}: {lines[0][:200]}", ok=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_part(name: str, lines: Path, sizes: Sizes, device: torch.device) -> None:
    """Check one part, in this process, and add each result to a file of JSON lines."""
    with lines.open("a") as out:
        for check in parts(sizes)[name]:
            for result in guarded(check, sizes, device):
                print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)


def run_apart(name: str, arguments: list[str], limit: float) -> Iterator[Result]:
    """The results of a part that runs in a process of its own, and of its end if that was bad."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "results"
        lines.touch()
        command = [sys.executable, "-m", _MODULE, "--part", name, "--lines", str(lines)]
        try:
            done = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, timeout=limit, check=False
            )
            ended = None if done.returncode == 0 else _last_words(done)
        except subprocess.TimeoutExpired:
            ended = f"did not end in {limit:.0f} s"
        for line in lines.read_text().splitlines():
            yield Result(**json.loads(line))
        if ended is not None:
            yield Result(f"part {name}", ended, ok=False)


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    words = done.stderr.strip().splitlines() or [""]
    return f"ended with {done.returncode}: {words[-1][:200]}"


def run(sizes: Sizes, arguments: list[str]) -> Iterator[Result]:
    """Every part, one after the other."""
    end = time.monotonic() + sizes.seconds
    for name in parts(sizes):
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            yield Result(f"part {name}", f"left out: {sizes.seconds:.0f} s are over", ok=False)
            continue
        yield from run_apart(name, arguments, min(left, sizes.part_seconds))


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check the kernels on the GPU of this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--dry-run", action="store_true", help="small, in Triton's interpreter")
    parser.add_argument("--seconds", type=float, help="for all together (default: 340)")
    parser.add_argument("--part", metavar="NAME", help="check this part alone, in this process")
    parser.add_argument("--lines", type=Path, default=Path("/dev/stdout"), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Check, print, write; 1 if anything missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.dry_run:
        # Read when Triton is imported, which nothing has done yet.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --dry-run needs none")
    device = torch.device("cpu" if options.dry_run else "cuda")
    sizes = SMOKE_SIZES if options.dry_run else DEVICE_SIZES
    if options.seconds is not None:
        sizes = dataclasses.replace(sizes, seconds=options.seconds)
    if options.part is not None:
        if options.part not in parts(sizes):
            parser.error(f"--part must be one of {', '.join(parts(sizes))}; got {options.part}")
        run_part(options.part, options.lines, sizes, device)
        return 0
    start = time.perf_counter()
    results = []
    report = describe(device)
    print(" ".join(f"{name}={value}" for name, value in report.items()))
    for result in run(sizes, ["--dry-run"] if options.dry_run else []):
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
