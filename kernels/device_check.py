"""Whether the kernels, and engines over them, are right and fast on the GPU of this machine.

`python -m miniinfer.kernels.device_check --json report.json` compares every kernel with a reference
in higher precision, measures the attention against the card's copy speed, and runs engines with
random weights beside transformers and vLLM, if installed; it prints a table, and exits with 1 if
anything misses. Each part has a process of its own: one that crashes or hangs costs its own results
alone, and the others keep their time. `--dry-run` goes through the same at small sizes in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
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
    seconds=330.0,
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
_RESERVED = {"speed": 0.12, "engine": 0.13, "transformers": 0.07}
"""The share of all time that a part, by the first word of its name, finds left in any case."""
_PACKAGES = ("transformers", "vllm")
"""What some parts, by the same word, cannot do without."""


def parts(sizes: Sizes) -> dict[str, tuple[Check, ...]]:
    """What is checked, by the name of its process."""
    found: dict[str, tuple[Check, ...]] = {}
    for head_dim in sizes.head_dims:
        attention = functools.partial(_check_accuracy.check_attention, head_dims=(head_dim,))
        found[f"attention d{head_dim}"] = (attention,)
    found |= {
        "accuracy": _check_accuracy.CHECKS[1:],
        "tokens": (_check_engine.check_tokens,),
        "speed": _check_speed.CHECKS,
    }
    for kind in ("engine", "transformers", "vllm"):
        check = getattr(_check_engine, f"check_{kind}")
        for name in sizes.models:
            found[f"{kind} {name}"] = (functools.partial(check, name=name),)
    return found


def rounds(sizes: Sizes) -> list[list[str]]:
    """The parts in the order in which they run: those that take no times side by side.

    What takes the time there is that kernels are compiled, each on one core.
    """
    names = list(parts(sizes))
    untimed = names[: names.index("speed")]
    return [untimed, *([name] for name in names[len(untimed) :])]


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


class Apart:
    """A part in a process and a session of its own, for so many seconds at most."""

    def __init__(self, name: str, arguments: list[str], limit: float) -> None:
        self.name = name
        self._limit = limit
        self._end_at = time.monotonic() + limit
        self._folder = tempfile.TemporaryDirectory()
        self._lines = Path(self._folder.name) / "results"
        self._lines.touch()
        self._errors = Path(self._folder.name) / "errors"
        command = [sys.executable, "-m", _MODULE, "--part", name, "--lines", str(self._lines)]
        with self._errors.open("wb") as errors:
            # Files: a pipe could be held open by a process that the part has left behind.
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def results(self) -> Iterator[Result]:
        """What it finds in its time, and of its end if that was bad."""
        try:
            code = self._process.wait(max(0.0, self._end_at - time.monotonic()))
            ended = None if code == 0 else f"ended with {code}: {self._last_words()}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {self._limit:.0f} s"
        self._end()
        for line in self._lines.read_text().splitlines():
            # The last one may have been cut.
            with contextlib.suppress(ValueError):
                yield Result(**json.loads(line))
        if ended is not None:
            yield Result(f"part {self.name}", ended, ok=False)

    def _last_words(self) -> str:
        words = self._errors.read_text(errors="replace").strip().splitlines() or [""]
        return words[-1][:200]

    def _end(self) -> None:
        """End what is left of it: what a part started may hold the GPU's memory."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, and forget what it left."""
        self._end()
        self._folder.cleanup()


def run_round(names: list[str], arguments: list[str], limit: float) -> Iterator[Result]:
    """The results of parts that run side by side for so many seconds at most."""
    with contextlib.ExitStack() as stack:
        running = []
        for name in names:
            running.append(Apart(name, arguments, limit))
            stack.callback(running[-1].close)
        for part in running:
            yield from part.results()


def run(sizes: Sizes, device: torch.device, arguments: list[str]) -> Iterator[list[Result]]:
    """Every part, round by round; later ones find their share of the time left."""
    end = time.monotonic() + sizes.seconds
    todo = rounds(sizes)
    for number, names in enumerate(todo):
        kind = names[0].partition(" ")[0]
        if kind in _PACKAGES and importlib.util.find_spec(kind) is None:
            # Says so at once, without the seconds that a process takes to import torch.
            yield list(parts(sizes)[names[0]][0](sizes, device))
            continue
        kept = sum(_RESERVED.get(later.partition(" ")[0], 0.0) for [later] in todo[number + 1 :])
        left = end - time.monotonic()
        limit = min(left - kept * sizes.seconds, sizes.part_seconds)
        if limit < _LEAST_SECONDS:
            found = f"left out: {left:.0f} of {sizes.seconds:.0f} s are left"
            yield [Result(f"part {name}", found, ok=False) for name in names]
            continue
        yield list(run_round(names, arguments, limit))


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
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}",
        description="Check the kernels, and engines over them, on the GPU of this machine: whether "
        "they are right, and how fast. Exits with 1 if anything missed.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="go through the same at small sizes, without a GPU: in Triton's interpreter",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"for all together (default: {DEVICE_SIZES.seconds:.0f}, with --dry-run "
        f"{SMOKE_SIZES.seconds:.0f})",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help=f"check this part alone, in this process: {', '.join(parts(DEVICE_SIZES))}; with "
        f"--dry-run {', '.join(parts(SMOKE_SIZES))}",
    )
    parser.add_argument("--lines", type=Path, default=Path("/dev/stdout"), help=argparse.SUPPRESS)
    return parser


def check_all(sizes: Sizes, device: torch.device, path: Path | None, arguments: list[str]) -> int:
    """Check every part, print each result and write them all; 1 if anything missed.

    The file is written anew after every round: whatever ends this one, it holds what was found.
    """
    start = time.perf_counter()
    results: list[Result] = []
    report = describe(device)
    print(" ".join(f"{name}={value}" for name, value in report.items()))
    report["finished"] = False

    def write() -> None:
        report["seconds"] = round(time.perf_counter() - start, 1)
        report["results"] = [dataclasses.asdict(result) for result in results]
        if path is not None:
            path.write_text(json.dumps(report, indent=1) + "\n")

    write()
    for found in run(sizes, device, arguments):
        results += found
        for result in found:
            print(result.line(), flush=True)
        write()
    report["finished"] = True
    write()
    missed = sum(not result.ok for result in results)
    print(f"{len(results)} checks, {missed} missed, {report['seconds']} s")
    return 1 if missed else 0


def main(arguments: list[str] | None = None) -> int:
    """Check, print, write; 1 if anything missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.dry_run:
        # Read when Triton is imported, which nothing has done yet.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --dry-run needs none")
    if importlib.util.find_spec("triton") is None:
        parser.error("the package triton is not installed (pip install triton)")
    device = torch.device("cpu" if options.dry_run else "cuda")
    sizes = SMOKE_SIZES if options.dry_run else DEVICE_SIZES
    if options.seconds is not None:
        sizes = dataclasses.replace(sizes, seconds=options.seconds)
    if options.part is not None:
        if options.part not in parts(sizes):
            parser.error(f"--part must be one of {', '.join(parts(sizes))}; got {options.part}")
        run_part(options.part, options.lines, sizes, device)
        return 0
    return check_all(sizes, device, options.json, ["--dry-run"] if options.dry_run else [])


if __name__ == "__main__":
    # What runs apart would outlive us.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
