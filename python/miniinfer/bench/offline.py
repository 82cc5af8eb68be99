"""A model without a server: throughput and times of batches of random prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from miniinfer.config import EngineArgs
from miniinfer.llm_engine import LLMEngine
from miniinfer.sampling_params import RequestOutputKind, SamplingParams

from . import plot
from .serve import LoadRun
from .serve_client import RequestResult
from .serve_report import figures

BATCHES = (1, 8, 32)
_COLUMNS = {
    "output_tokens_per_second": "output tok/s",
    "prompt_tokens_per_second": "prompt tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "e2e_p50_ms": "e2e p50",
}
_CHARTS = {
    "output_tokens_per_second": ("output tokens a second by batch", "tokens/s"),
    "ttft_p50_ms": ("time to first token by batch, median", "ms"),
    "itl_p50_ms": ("inter-token latency by batch, median", "ms"),
    "e2e_p50_ms": ("end to end by batch, median", "ms"),
}

Found = dict[int, dict[str, Any]]
"""The figures of `serve_report.figures`, by batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSettings:
    """What is generated. Raises `ValueError` naming the setting, its limit and its value."""

    batches: Sequence[int] = BATCHES
    input_tokens: int = 128
    max_tokens: int = 64
    rounds: int = 3
    """Batches of each size that count; one ahead of them does not."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "max_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"a batch size must be at least 1, got {batch}")


def measure(args: EngineArgs, settings: OfflineSettings) -> Found:
    """Load the model and generate; every request of a batch is there from the start.

    Raises `ValueError` if a request is longer than the model allows.
    """
    engine = LLMEngine(args)
    limit, asked = engine.engine.max_model_len, settings.input_tokens + settings.max_tokens
    if asked > limit:
        raise ValueError(
            f"input_tokens and max_tokens must be at most {limit} together, the longest request "
            f"of the model, got {asked}"
        )
    source = random.Random(settings.seed)
    found: Found = {}
    for batch in settings.batches:
        run_batch(engine, batch, settings, source)
        runs = [run_batch(engine, batch, settings, source) for _ in range(settings.rounds)]
        results = [result for run in runs for result in run.results]
        seconds = sum(run.seconds for run in runs)
        found[batch] = figures(LoadRun(results, seconds, engine.engine.model_name))
    return found


def run_batch(
    engine: LLMEngine, batch: int, settings: OfflineSettings, source: random.Random
) -> LoadRun:
    """Generate for a batch of prompts that no cache holds, and note when tokens come."""
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens, ignore_eos=True)
    params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
    prompts = [
        source.choices(range(engine.engine.vocab_size), k=settings.input_tokens)
        for _ in range(batch)
    ]
    began = time.perf_counter()
    results: dict[str, RequestResult] = {}
    for prompt in prompts:
        request = engine.add_request(None, {"prompt_token_ids": prompt}, params)
        results[request] = RequestResult(began, prompt_tokens=len(prompt))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            result = results[output.request_id]
            tokens = sum(len(choice.token_ids) for choice in output.outputs)
            if tokens:
                result.arrivals.append(now)
                result.output_tokens += tokens
            if output.finished:
                result.ended = now
                result.error = _failure(output.outputs)
    return LoadRun(list(results.values()), time.perf_counter() - began, engine.engine.model_name)


def _failure(choices: Sequence[Any]) -> str | None:
    failed = any(choice.finish_reason == "error" for choice in choices)
    return "the engine failed" if failed else None


def table(found: Found) -> str:
    """Return the figures for people, a line for each batch size; times in milliseconds."""
    lines = [f"{'batch':>6}" + "".join(f"{title:>14}" for title in _COLUMNS.values())]
    for batch, values in found.items():
        cells = (values.get(name) for name in _COLUMNS)
        shown = (f"{'':>14}" if cell is None else f"{cell:14,.1f}" for cell in cells)
        lines.append(f"{batch:6}" + "".join(shown))
    errors = {kind for values in found.values() for kind in values["errors"]}
    return "\n".join([*lines, *(f"error: {kind}" for kind in sorted(errors))])


def page(found: Found) -> str:
    """Return the figures as a page with charts."""
    charts = []
    for name, (title, unit) in _CHARTS.items():
        points = [(float(batch), values[name]) for batch, values in found.items() if name in values]
        charts.append(plot.chart(title, "requests at once", unit, sorted(points), line=True))
    model = next(iter(found.values()))["model"]
    return plot.page("miniinfer bench offline", str(model), table(found), charts)
