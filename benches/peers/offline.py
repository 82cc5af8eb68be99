"""Engines without a server, each in a process of its own that works when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from miniinfer.fetch import ensure_builtin

from . import places

ROUNDS = 3
BATCHES = (1, 8, 32)
_SHORT = 16
_DECODED = 64

Seconds = Callable[[int, int, int], float]
"""Batch, prompt tokens, output tokens: the seconds that it takes."""


class Worker:
    """`offline_child.py` with one engine, idle until asked."""

    def __init__(self, engine: str, model: str, dtype: str) -> None:
        self.name = f"{engine}-{dtype}"
        child = Path(__file__).with_name("offline_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(child), engine, model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # As the command line does; it changes nothing where nobody else wants the cores.
            env={"GOMP_SPINCOUNT": "1000"} | os.environ,
        )

    def seconds(self, batch: int, prompt: int, output: int) -> float:
        """Generate; raises `RuntimeError` if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([batch, prompt, output]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def workers(*wanted: tuple[str, str, str]) -> Iterator[list[Worker]]:
    """A worker for each engine, model and dtype."""
    made: list[Worker] = []
    try:
        for each in wanted:
            made.append(Worker(*each))
        yield made
    finally:
        for worker in made:
            worker.close()


def in_turns(measures: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[list[float]]:
    """What each measure gave in each round, one after the other within a round."""
    for measure in measures:
        measure()
    rows = [[measure() for measure in measures] for _ in range(rounds)]
    return [list(column) for column in zip(*rows, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def prefill_rate(worker: Worker) -> Callable[[], float]:
    """Tokens a second of a prompt of 512."""
    return lambda: 512 / worker.seconds(1, 512, 1)


def decode_rate(worker: Worker) -> Callable[[], float]:
    """Tokens a second of one stream that has hardly a prompt, as llama-bench measures it."""
    return lambda: (
        _DECODED / (worker.seconds(1, _SHORT, 1 + _DECODED) - worker.seconds(1, _SHORT, 1))
    )


def request_rate(worker: Worker, batch: int) -> Callable[[], float]:
    """Output tokens a second of a batch of the servers' load."""
    return lambda: 64 * batch / worker.seconds(batch, 128, 64)


def llama_bench(kind: str) -> Callable[[], float]:
    """Tokens a second by llama-bench: pp512 for `prefill`, tg64 for `decode`."""
    counts = {"prefill": ("512", "0"), "decode": ("0", "64")}[kind]

    def run() -> float:
        done = subprocess.run(
            [
                *(str(places.llama_binary("llama-bench")), "-m", str(ensure_builtin())),
                *("-p", counts[0], "-n", counts[1], "-t", str(os.cpu_count())),
                *("-r", "1", "-o", "json"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        return float(json.loads(done.stdout)[0]["avg_ts"])

    return run
