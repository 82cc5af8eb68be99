"""Prometheus metrics under vLLM's names with the prefix `miniinfer:`.

Nearly all of it is read from `Engine.stats()` when /metrics is asked. Nothing in this file can fail
a request.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from miniinfer.safe_logging import SafeLogger

if TYPE_CHECKING:
    from .admission import RequestQueue

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
    "corrupted_requests": "Requests whose logits were not finite.",
    "prompt_tokens": "Tokens of the prompts that came.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Times that draft tokens of a choice were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were right.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From submission to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a choice.",
    "e2e_request_latency_seconds": "From submission to the last token.",
    "request_queue_time_seconds": "From submission to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "iteration_tokens_total": "Tokens computed in a step.",
    "request_time_per_output_token_seconds": "Decode time of a choice by its later tokens.",
}
_REASONS = ("stop", "length", "abort", "error")
_CHANNEL_ACTIONS = {
    "merged": "deltas_merged",
    "paused": "readers_paused",
    "cancelled": "readers_cancelled",
}
REJECTIONS = (
    "aborted",
    "connections",
    "engine_dead",
    "invalid_api_key",
    "key_queue_full",
    "overloaded",
    "queue_full",
    "queue_timeout",
    "queue_tokens_full",
    "shutting_down",
)
"""Why a request is refused, or ended, that asked for nothing wrong."""
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
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
        self.longest_choice = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.n = Histogram(_CHOICES)
        self.num_connections = 0
        self._rejections = Counter(dict.fromkeys(REJECTIONS, 0))
        self._responses: Counter[tuple[str, str]] = Counter()
        self._highest: dict[str, float] = {}

    def observe_request(
        self,
        prompt_tokens: Iterable[int],
        output_tokens: Sequence[int],
        *,
        n: int,
        max_tokens: int | None,
    ) -> None:
        """Count a request whose choices have all ended; tokens of each prompt, of each choice."""
        for tokens in prompt_tokens:
            self.prompt_tokens.observe(tokens)
        for tokens in output_tokens:
            self.generation_tokens.observe(tokens)
        self.longest_choice.observe(max(output_tokens))
        self.n.observe(n)
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)

    def reject(self, reason: str) -> None:
        """Count a request that is refused or ended for one of `REJECTIONS`."""
        self._rejections[reason] += 1

    def count_response(self, route: str, status: int) -> None:
        """Count an answer by its route and status."""
        self._responses[route, str(status)] += 1

    def render(self, stats: Mapping[str, Any], model: str, queue: RequestQueue) -> bytes:
        """Return everything in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(lambda: self._families(stats, model)))
        registry.register(_Families(lambda: self._server_families(model, queue)))
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def _families(self, stats: Mapping[str, Any], model: str) -> Iterable[Metric]:
        for name, help_text in _GAUGES.items():
            yield _gauge(name, help_text, model, stats.get(name, 0))
        yield _waiting_by_reason(stats, model)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use.", model, kv_usage(stats))
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=[MODEL_LABEL])
            counter.add_metric([model], self._monotone(name, stats.get(name, 0)))
            yield counter
        yield self._by_label(
            "request_success",
            "Choices that ended, by reason.",
            "finished_reason",
            {reason: stats.get(f"finished_{reason}", 0) for reason in _REASONS},
            model,
        )
        yield self._by_label(
            "channel_policy_actions",
            "What was done about clients that did not read: deltas merged, requests paused, "
            "requests cancelled.",
            "action",
            {action: stats.get(name, 0) for action, name in _CHANNEL_ACTIONS.items()},
            model,
        )
        yield _cache_info(stats, model)
        for name, help_text in _HISTOGRAMS.items():
            if name in stats:
                yield histogram(name, help_text, model, *stats[name])
        for name, help_text, own in (
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of a choice.", self.generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Tokens of a request's longest choice.",
                self.longest_choice,
            ),
            ("request_params_max_tokens", "Tokens a request may generate.", self.max_tokens),
            ("request_params_n", "Choices that a request asks for.", self.n),
        ):
            yield histogram(name, help_text, model, own.bounds, own.counts, own.sum)

    def _server_families(self, model: str, queue: RequestQueue) -> Iterable[Metric]:
        for name, help_text, value in (
            ("num_requests_queued", "HTTP requests without a first token.", queue.num_requests),
            ("num_tokens_queued", "Prompt tokens of those.", queue.num_tokens),
            ("num_connections", "Open connections.", self.num_connections),
        ):
            yield _gauge(name, help_text, model, value)
        yield self._by_label(
            "admission_rejections",
            "Requests refused or ended that asked for nothing wrong, by reason.",
            "reason",
            self._rejections,
            model,
        )
        responses = CounterMetricFamily(
            PREFIX + "http_responses", "HTTP answers.", labels=["route", "code"]
        )
        for labels, count in self._responses.items():
            responses.add_metric(labels, count)
        yield responses
        dropped = CounterMetricFamily(
            PREFIX + "log_records_dropped", "Log records that could not be written."
        )
        dropped.add_metric([], SafeLogger.dropped)
        yield dropped

    def _by_label(
        self, name: str, help_text: str, label: str, values: Mapping[str, float], model: str
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=[MODEL_LABEL, label])
        for value_of_label, value in values.items():
            highest = self._monotone(f"{name}/{value_of_label}", value)
            family.add_metric([model, value_of_label], highest)
        return family

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


def _cache_info(stats: Mapping[str, Any], model: str) -> Metric:
    """Return the sizes of the KV cache as labels of a constant, as vLLM does."""
    blocks = stats.get("kv_blocks_total", 0)
    tokens = stats.get("kv_cache_tokens", 0)
    labels = {
        MODEL_LABEL: model,
        "block_size": str(tokens // blocks if blocks else 0),
        "num_blocks": str(blocks),
    }
    info = GaugeMetricFamily(
        PREFIX + "cache_config_info", "Sizes of the KV cache.", labels=list(labels)
    )
    info.add_metric(list(labels.values()), 1.0)
    return info


def _waiting_by_reason(stats: Mapping[str, Any], model: str) -> Metric:
    """Return the waiting requests by what they wait for, under vLLM's labels."""
    family = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason",
        "Waiting requests by reason: capacity, room in a step or in the KV cache; deferred, "
        "another choice of the request, or a client that was behind.",
        labels=[MODEL_LABEL, "reason"],
    )
    deferred = float(stats.get("num_requests_deferred", 0))
    family.add_metric([model, "capacity"], float(stats.get("num_requests_waiting", 0)) - deferred)
    family.add_metric([model, "deferred"], deferred)
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
