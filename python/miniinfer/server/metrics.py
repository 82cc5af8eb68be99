"""Prometheus metrics under vLLM's names with the prefix `miniinfer:`.

Gauges and counters are read from `Engine.stats()` when /metrics is asked; the latency histograms
are counted here, where the client's waiting is seen. Nothing in this file can fail a request.
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
    "kv_cache_usage_perc": "Share of KV blocks in use; 1 means all.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that lost their blocks and were computed again.",
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
}

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """A histogram that costs one bisection per observation.

    prometheus_client's own takes a lock for every bucket, which a token's path cannot afford.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help_text: str, model: str) -> Metric:
        """Return the histogram for Prometheus: cumulative buckets and the sum."""
        buckets = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class Metrics:
    """The histograms of one server and its registry."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_SECONDS)
        self.inter_token_latency = Histogram(_SECONDS)
        self.request_latency = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._highest: dict[tuple[str, ...], float] = {}

    def render(self, stats: Mapping[str, Any], model: str) -> bytes:
        """Return everything in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(lambda: self._families(stats, model)))
        return generate_latest(registry)

    def _families(self, stats: Mapping[str, Any], model: str) -> Iterable[Metric]:
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([model], float(stats.get(name, 0)))
            yield gauge
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([model], self._monotone((name,), stats.get(name, 0)))
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in sorted(stats.get("request_success", {}).items()):
            success.add_metric([model, reason], self._monotone(("request_success", reason), count))
        yield success
        yield from self._histograms(model)

    def _histograms(self, model: str) -> Iterable[Metric]:
        named = (
            ("time_to_first_token_seconds", "From submission to the first delta.", "first"),
            ("inter_token_latency_seconds", "Mean time per token within a delta.", "between"),
            ("e2e_request_latency_seconds", "From submission to the end of an answer.", "whole"),
            ("request_prompt_tokens", "Prompt tokens of a prompt.", "prompt"),
            ("request_generation_tokens", "Tokens generated for a choice.", "output"),
        )
        histograms = {
            "first": self.time_to_first_token,
            "between": self.inter_token_latency,
            "whole": self.request_latency,
            "prompt": self.prompt_tokens,
            "output": self.generation_tokens,
        }
        for name, help_text, key in named:
            yield histograms[key].family(name, help_text, model)

    def _monotone(self, key: tuple[str, ...], value: float) -> float:
        """Return a counter that never goes back, whatever the engine says."""
        highest = max(float(value), self._highest.get(key, 0.0))
        self._highest[key] = highest
        return highest


class _Families(Collector):
    """Adapts a function to the interface that a registry wants."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()
