from __future__ import annotations

import pytest

from miniinfer.server.banner import banner, base_url
from miniinfer.server.config import ServerConfig
from miniinfer.server.keys import ApiKey
from miniinfer.server.metrics import Histogram, histogram
from miniinfer.server.stats_log import describe

from .fake import FakeEngine


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"max_body_size": 0}, "max_body_size"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests"),
        ({"keep_alive_interval": -1}, "keep_alive_interval"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout"),
        ({"stalled_client_timeout": 0}, "stalled_client_timeout"),
        ({"stalled_client_timeout": float("inf")}, "stalled_client_timeout"),
        ({"stats_interval": float("nan")}, "stats_interval"),
        ({"served_model_names": ("",)}, "model name"),
        ({"tool_call_parser": "hermit"}, "tool_call_parser must be .*'hermes'.* got 'hermit'"),
        ({"reasoning_parser": ""}, "reasoning_parser"),
    ],
)
def test_bad_settings(fields, named):
    with pytest.raises(ValueError, match=named):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_base_url(host, expected):
    assert base_url(host, 80) == expected


def test_banner_names_what_a_user_needs():
    engine = FakeEngine()
    engine.counters["kv_cache_tokens"] = 4096
    text = banner(engine, ServerConfig(api_keys=(ApiKey.of("secret"),)), ("127.0.0.1", 1234))
    for part in ("fake-model", "64 tokens", "4096 tokens", "http://127.0.0.1:1234", "curl -N"):
        assert part in text
    assert "secret" not in text


def test_histogram_counts_a_bound_in_its_bucket():
    counted = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        counted.observe(value)
    family = histogram("h", "help", "m", counted.bounds, counted.counts, counted.sum)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert samples == {
        "1.0": 2,
        "2.0": 4,
        "+Inf": 5,
        "miniinfer:h_count": 5,
        "miniinfer:h_sum": 8,
    }


def test_statistics_line():
    before = {"prompt_tokens": 10, "generation_tokens": 5}
    now = {
        "prompt_tokens": 30,
        "generation_tokens": 15,
        "num_requests_running": 2,
        "kv_blocks_used": 5,
        "kv_blocks_total": 10,
        "prefix_cache_queries": 10,
        "prefix_cache_hits": 4,
    }
    line = describe(before, now, 2.0)
    assert line == (
        "running 2, waiting 0, prompt 10.0 tokens/s, generation 5.0 tokens/s, "
        "KV cache 50.0%, prefix hits 40.0%"
    )
    assert "prefix hits 0.0%" in describe({}, {}, 1.0)
    preempting = describe({"num_preemptions": 1}, {"num_preemptions": 4}, 1.0)
    assert "3 preemptions: raise --kv-cache-memory or lower --max-num-seqs" in preempting
    assert "preemptions" not in describe({"num_preemptions": 4}, {"num_preemptions": 4}, 1.0)
