"""Measure the control plane as Python sees it, beside a scheduler in plain Python.

Both run the same load in the same process, in turns of a few steps, so that a machine that slows
down slows both. Figures are medians in microseconds, but for the one that says p99.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from . import plot
from .loads import CoreLoad, Load, LoadSize, PythonLoad, random_prompt

__all__ = ["Figures", "measure", "page", "table"]

Figures = dict[str, float]

SIZES = {
    "plan_commit_us_256": LoadSize(256, steps=640),
    "plan_commit_us_1024": LoadSize(1024),
    "plan_commit_us_4096": LoadSize(4096, steps=96),
    "plan_commit_us_256_waiting_10000": LoadSize(256, 10_000, steps=640),
}
PROMPT = 8192
CANCELS = 10_000

TITLES = {
    "plan_commit_us_256": "plan and commit a step, 256 decoding",
    "plan_commit_us_1024": "plan and commit a step, 1,024 decoding",
    "plan_commit_us_4096": "plan and commit a step, 4,096 decoding",
    "plan_commit_us_256_waiting_10000": "the same with 256, and 10,000 waiting",
    "drain_us_per_token": "take a token's text from the core",
    "admit_us_8192_cold": "admit a prompt of 8,192, none cached",
    "admit_us_8192_hit": "admit a prompt of 8,192, all cached",
    "cancel_us": "cancel a request, one of 10,000",
    "python_plan_commit_p50_us_256": "a step of 256 beside a busy event loop",
    "python_plan_commit_p99_us_256": "the same, 99th percentile",
}
"""The figures in words, in the order of the table."""

# The server's switch interval; with the default of 5 ms a thread can wait that long for its turn.
SWITCH_INTERVAL_SECONDS = 0.0005

_TURN = 8
_FORWARD_SECONDS = 0.001


def measure(scale: float = 1.0) -> tuple[Figures, Figures]:
    """Return the figures of the core, as seen from Python, and of the scheduler in Python.

    `scale` shortens everything, for tests: 1 takes about ten seconds.
    """
    core: Figures = {}
    python: Figures = {}
    gc.collect()
    gc.freeze()
    try:
        for name, size in SIZES.items():
            shrunk = LoadSize(
                max(2, int(size.running * scale)), int(size.waiting * scale), size.steps
            )
            core[name], python[name], drained = _steps(shrunk, scale)
            if name == "plan_commit_us_256":
                core["drain_us_per_token"] = drained
        for hit in (False, True):
            name = f"admit_us_8192_{'hit' if hit else 'cold'}"
            core[name], python[name] = _admissions(hit, scale)
        core["cancel_us"], python["cancel_us"] = (
            _cancels(kind(LoadSize(256)), int(CANCELS * scale) or 1)
            for kind in (CoreLoad, PythonLoad)
        )
        for name, percentile in _beside_a_busy_loop(scale).items():
            core[name] = percentile
    finally:
        gc.unfreeze()
    return core, python


def _steps(size: LoadSize, scale: float) -> tuple[float, float, float]:
    core, python = CoreLoad(size), PythonLoad(size)
    core.drained.clear()
    times: tuple[list[float], list[float]] = ([], [])
    rounds = max(1, int(size.steps * scale) // _TURN)
    with _collector_off():
        for turn in range(rounds):
            # The scheduler in Python takes a tenth of the turns: it is slower by more than that.
            pairs: list[tuple[Load, list[float]]] = [(core, times[0])]
            if turn % 4 == 0:
                pairs.append((python, times[1]))
            for load, into in pairs:
                for _ in range(_TURN):
                    into.append(load.step())
    while not core.drained:
        # The text thread has yet to get its turn.
        core.step()
    assert core.num_sampled() == python.num_sampled() == size.running
    assert core.model.core.stats()["num_preemptions"] == 0
    return (*(_us(statistics.median(each)) for each in times), _us(statistics.median(core.drained)))  # type: ignore[return-value]


def _admissions(hit: bool, scale: float) -> tuple[float, float]:
    length = max(64, int(PROMPT * scale))
    size = LoadSize(0, max_num_batched_tokens=PROMPT, max_model_len=PROMPT + 64)
    loads: tuple[Load, ...] = (CoreLoad(size), PythonLoad(size))
    times: tuple[list[float], ...] = ([], [])
    prompt = random_prompt(random.Random(1), length)
    for turn in range(max(2, int(40 * scale))):
        for load, into in zip(loads, times, strict=True):
            elapsed = _admit(load, prompt)
            if turn or not hit:
                into.append(elapsed)
            if not hit:
                load.forget()
    return _us(statistics.median(times[0])), _us(statistics.median(times[1]))


def _admit(load: Load, prompt: list[int]) -> float:
    """Seconds from submission to the commit that makes the prompt's blocks findable."""
    clock = time.perf_counter
    begun = clock()
    number = load.submit(prompt)
    planned = load.plan()
    elapsed = clock() - begun
    assert planned
    begun = clock()
    load.finish_step()
    elapsed += clock() - begun
    load.cancel(number)
    load.plan()
    return elapsed


def _cancels(load: Load, count: int) -> float:
    generator = random.Random(2)
    numbers = [load.submit(random_prompt(generator, 64)) for _ in range(count)]
    generator.shuffle(numbers)
    load.step()
    clock = time.perf_counter
    begun = clock()
    for number in numbers:
        load.cancel(number)
    load.plan()
    return _us((clock() - begun) / count)


def _beside_a_busy_loop(scale: float) -> Figures:
    """Plan and commit with an event loop that never rests on another thread of the process."""
    size = LoadSize(max(2, int(256 * scale)), steps=int(1800 * scale) + 2, max_model_len=4096)
    load = CoreLoad(size)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        with _busy_loop(), _collector_off():
            times = []
            for _ in range(size.steps):
                # The forward pass: it lets go of the interpreter's lock.
                time.sleep(_FORWARD_SECONDS)
                times.append(load.step())
    finally:
        sys.setswitchinterval(interval)
    times.sort()
    return {
        "python_plan_commit_p50_us_256": _us(statistics.median(times)),
        "python_plan_commit_p99_us_256": _us(times[int(0.99 * (len(times) - 1))]),
    }


@contextmanager
def _busy_loop() -> Iterator[None]:
    loop = asyncio.new_event_loop()

    def work() -> None:
        sum(range(200))
        loop.call_soon(work)

    loop.call_soon(work)
    thread = threading.Thread(target=loop.run_forever, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection in between: it would count for whoever runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def table(core: Figures, python: Figures) -> str:
    """Return the figures in columns, with what the scheduler in Python takes as a multiple."""
    lines = [
        "Microseconds, medians. core: miniinfer's, called from Python as its engine does;",
        "plain Python: a scheduler of the same semantics; ratio: how many times as long it takes.",
        "",
        f"{'':40} {'core':>10} {'plain Python':>14} {'ratio':>8}",
    ]
    for name, title in TITLES.items():
        if name not in core:
            continue
        value, other = core[name], python.get(name)
        rest = "" if other is None else f" {other:14,.1f} {other / value:7.1f}x"
        lines.append(f"{title:40} {value:10,.2f}{rest}")
    return "\n".join(lines)


def page(core: Figures, python: Figures) -> str:
    """Return the figures as a page with charts of a step by the requests that decode."""
    charts = []
    for title, figures in (("compiled core", core), ("scheduler in Python", python)):
        points = [
            (float(size.running), figures[name])
            for name, size in SIZES.items()
            if not size.waiting and name in figures
        ]
        name = f"plan and commit by decoding requests: {title}"
        charts.append(plot.chart(name, "requests", "us", points, line=True))
    return plot.page("miniinfer bench core", "the control plane", table(core, python), charts)
