"""Prometheus metrics under vLLM's names with the prefix `miniinfer:`.

Nearly all of it is read from `Engine.stats()` when /metrics is asked. Nothing in this file can fail
a request.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "miniinfer:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_GAUGES = {
    "num_requests_running": "Requests that take part in steps.",
    "num_requests_waiting": "Requests that wait for their first step or to be resumed.",
    "num_requests_paused": "Requests that wait for their client to read.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that lost their blocks and were computed again.",
    "prompt_tokens": "Tokens of the prompts that came.",
    "generation_tokens": "Tokens generated.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From submission to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a choice.",
    "e2e_request_latency_seconds": "From submission to the last token.",
    "request_queue_time_seconds": "From submission to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}
_REASONS = ("stop", "length", "abort", "error")
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

MODEL_LABEL = "model_name"


class Histogram:
    """Counts values by bucket; `bounds` are the buckets' upper ends, which belong to them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """What one server counts itself, and how everything is written."""

    def __init__(self) -> None:
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._highest: dict[str, float] = {}

    def render(self, stats: Mapping[str, Any], model: str) -> bytes:
        """Return everything in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(lambda: self._families(stats, model)))
        return generate_latest(registry)

    def _families(self, stats: Mapping[str, Any], model: str) -> Iterable[Metric]:
        for name, help_text in _GAUGES.items():
            yield _gauge(name, help_text, model, stats.get(name, 0))
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use.", model, kv_usage(stats))
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=[MODEL_LABEL])
            counter.add_metric([model], self._monotone(name, stats.get(name, 0)))
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success",
            "Choices that ended, by reason.",
            labels=[MODEL_LABEL, "finished_reason"],
        )
        for reason in _REASONS:
            name = f"finished_{reason}"
            success.add_metric([model, reason], self._monotone(name, stats.get(name, 0)))
        yield success
        for name, help_text in _HISTOGRAMS.items():
            if name in stats:
                yield histogram(name, help_text, model, *stats[name])
        for name, help_text, own in (
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of a choice.", self.generation_tokens),
        ):
            yield histogram(name, help_text, model, own.bounds, own.counts, own.sum)

    def _monotone(self, name: str, value: float) -> float:
        """Return a counter that never goes back, whatever the engine says."""
        highest = max(float(value), self._highest.get(name, 0.0))
        self._highest[name] = highest
        return highest


def kv_usage(stats: Mapping[str, Any]) -> float:
    """Return the share of KV blocks that requests hold, from 0 to 1."""
    total = stats.get("kv_blocks_total", 0)
    return float(stats.get("kv_blocks_used", 0)) / total if total else 0.0


def histogram(
    name: str,
    help_text: str,
    model: str,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """Return a histogram for Prometheus, whose buckets each count the smaller ones too.

    `counts` has one entry more than `bounds`, for what is beyond them; `total` is the values' sum.
    """
    buckets = []
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(below)))
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=[MODEL_LABEL])
    family.add_metric([model], buckets, total)
    return family


def _gauge(name: str, help_text: str, model: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=[MODEL_LABEL])
    gauge.add_metric([model], float(value))
    return gauge


class _Families(Collector):
    """Adapts a function to the interface that a registry wants."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()
