"""What is told of requests: metrics, access log, JSON logs, traces; and what is not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from miniinfer.cli.logs import JsonFormatter, LineFormatter
from miniinfer.safe_logging import SafeLogger, safe_logger
from miniinfer.server.metrics import PREFIX
from miniinfer.server.tracing import Tracing, TracingError

from .fake import FakeDelta, Pause, answer
from .serving import serving
from .sse_client import read_events

CHAT = "/v1/chat/completions"
SECRET = "nobody may read this"
BODY = {"messages": [{"role": "user", "content": SECRET}]}
ROOT = Path(__file__).resolve().parents[2]

# vLLM's metrics that apply to one model on one device without images or adapters.
VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "admission_rejections",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "iteration_tokens_total",
    "corrupted_requests",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "cache_config_info",
}


async def families(session):
    async with session.get("/metrics") as response:
        assert response.status == 200
        return {f.name: f for f in text_string_to_metric_families(await response.text())}


def samples(family):
    return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}


async def test_metrics_have_vllm_s_names(tiny_model):
    from .real import real_server

    async with real_server(tiny_model) as (url, _):
        import aiohttp

        async with aiohttp.ClientSession(url) as session:
            body = {"prompt": "ab", "n": 2, "max_tokens": 3, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
            found = await families(session)
    assert {PREFIX + name for name in VLLM} <= set(found)
    values = {s.name: s.value for f in found.values() for s in f.samples}
    for name, expected in (
        ("request_params_n_sum", 2),
        ("request_params_max_tokens_sum", 3),
        ("request_max_num_generation_tokens_sum", 3),
        ("request_generation_tokens_sum", 6),
        ("request_prompt_tokens_sum", 2),
        ("request_inference_time_seconds_count", 2),
        ("request_time_per_output_token_seconds_count", 2),
        ("corrupted_requests_total", 0),
        # Of each choice the prompt, shorter than a block, and all but the last token.
        ("iteration_tokens_total_sum", 8),
    ):
        assert values[PREFIX + name] == expected, name


async def test_responses_are_counted_by_route_and_code(client, engine):
    engine.script = lambda ids, params: answer(params, ["a"])
    for path, method in ((CHAT, "POST"), ("/x/1", "GET"), ("/x/2", "GET"), (CHAT, "GET")):
        body = BODY if method == "POST" else None
        async with client.request(method, path, json=body):
            pass
    counted = samples((await families(client))["miniinfer:http_responses"])
    assert counted[("code", "200"), ("route", CHAT)] == 1
    assert counted[("code", "404"), ("route", "other")] == 2
    assert counted[("code", "405"), ("route", "other")] == 1


async def test_waiting_requests_are_shown_by_reason(client, engine):
    engine.counters |= {"num_requests_waiting": 7, "num_requests_deferred": 2}
    found = await families(client)
    shown = samples(found["miniinfer:num_requests_waiting_by_reason"])
    by_reason = {dict(labels)["reason"]: value for labels, value in shown.items()}
    assert by_reason == {"capacity": 5, "deferred": 2}
    assert sum(by_reason.values()) == sum(samples(found["miniinfer:num_requests_waiting"]).values())


async def test_channel_actions_are_shown(client, engine):
    engine.counters |= {"deltas_merged": 7, "readers_paused": 2, "readers_cancelled": 1}
    shown = samples((await families(client))["miniinfer:channel_policy_actions"])
    assert {dict(labels)["action"]: value for labels, value in shown.items()} == {
        "merged": 7,
        "paused": 2,
        "cancelled": 1,
    }


def test_the_dashboard_asks_for_metrics_that_exist():
    from miniinfer.server.admission import RequestQueue
    from miniinfer.server.config import ServerConfig
    from miniinfer.server.metrics import Metrics

    stats = dict.fromkeys((n for n in VLLM if n.endswith("_seconds")), ((1.0,), (0, 0), 0.0))
    metrics = Metrics()
    metrics.count_response(CHAT, 200)
    text = metrics.render(stats, "m", RequestQueue(ServerConfig())).decode()
    exposed = {s.name for f in text_string_to_metric_families(text) for s in f.samples}
    dashboard = json.loads((ROOT / "examples/grafana-dashboard.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    named = set(re.findall(r"(?:miniinfer:|process_)\w+", " ".join(expressions)))
    assert len(named) > 15
    assert named <= exposed
    assert all("miniinfer:" in e or "process_" in e for e in expressions)


async def test_the_access_line(engine, caplog):
    engine.script = lambda ids, params: answer(params, ["a", "b"], prompt=len(ids), cached=4)
    caplog.set_level(logging.INFO, "miniinfer.access")
    async with serving(engine) as session:
        headers = {"X-Request-Id": "mine-1"}
        async with session.post(CHAT, json={**BODY, "stream": True}, headers=headers) as response:
            await read_events(response)
        async with session.get("/nothing\x1b[31m%0d%0ahere?prompt=" + SECRET) as response:
            assert response.status == 404
        async with session.get("/health"):
            pass
    first, second = (r for r in caplog.records if r.name == "miniinfer.access")
    assert first.fields["id"] == "mine-1"
    assert first.fields["answer_id"] == engine.requests[0].options["request_id"]
    assert first.fields["route"] == CHAT
    assert first.fields["status"] == 200
    assert first.fields["prompt_tokens"] == len(SECRET) + 3
    assert first.fields["cached_tokens"] == 4
    assert first.fields["output_tokens"] == 2
    assert first.fields["finish_reason"] == "stop"
    assert 0 <= first.fields["submitted"] <= first.fields["first_token"] <= first.fields["duration"]
    assert second.fields["code"] == "route_not_found"
    for record in (first, second):
        line = record.getMessage()
        assert line.isprintable()
        assert SECRET not in line
        assert "nobody" not in json.dumps(record.fields)


async def test_probes_are_lines_for_debugging(engine, caplog):
    caplog.set_level(logging.DEBUG, "miniinfer.access")
    async with serving(engine, max_concurrent_requests=1) as session:
        for path in ("/health", "/ping", "/ready", "/metrics", "/version"):
            async with session.get(path) as response:
                assert response.status == 200
        engine.is_healthy = False
        async with session.get("/health") as response:
            assert response.status == 503
    lines = [r for r in caplog.records if r.name == "miniinfer.access"]
    levels = [(r.fields["route"], r.fields["status"], r.levelname) for r in lines]
    assert levels == [
        ("/health", 200, "DEBUG"),
        ("/ping", 200, "DEBUG"),
        ("/ready", 200, "DEBUG"),
        ("/metrics", 200, "DEBUG"),
        ("/version", 200, "INFO"),
        ("/health", 503, "DEBUG"),
    ]


async def test_a_client_that_left_is_logged(engine, caplog):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause]
    caplog.set_level(logging.INFO, "miniinfer.access")
    async with serving(engine) as session:
        task = asyncio.create_task(session.post(CHAT, json=BODY))
        await pause.reached.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not any(r.name == "miniinfer.access" for r in caplog.records):
            await asyncio.sleep(0.005)
        counted = samples((await families(session))["miniinfer:http_responses"])
    assert counted[("code", "499"), ("route", CHAT)] == 1
    [record] = (
        r for r in caplog.records if r.name == "miniinfer.access" and r.fields["status"] != 200
    )
    assert record.fields["status"] == 499


async def test_an_error_in_a_stream_is_in_the_line(engine, caplog):
    failed = FakeDelta("", finish_reason="error", error="it failed")
    engine.script = lambda ids, params: [FakeDelta("a"), failed]
    caplog.set_level(logging.INFO, "miniinfer.access")
    streamed = {**BODY, "stream": True}
    async with serving(engine) as session, session.post(CHAT, json=streamed) as response:
        await read_events(response)
    [record] = (r for r in caplog.records if r.name == "miniinfer.access")
    assert record.fields["status"] == 200
    assert record.fields["code"] == "internal_error"


class FullDisk(logging.Handler):
    """A handler of a disk that has no room, which does not keep that to itself."""

    def emit(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk():
    handler = FullDisk(logging.DEBUG)
    ours = logging.getLogger("miniinfer")
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield
    ours.removeHandler(handler)
    ours.setLevel(level)


async def test_a_full_disk_breaks_no_request(engine, full_disk):
    dropped = SafeLogger.dropped
    async with serving(engine) as session:
        async with session.post(CHAT, json={**BODY, "stream": True}) as response:
            assert len(await read_events(response)) > 2
        engine.refuse = RuntimeError("a defect, which is logged")
        async with session.post(CHAT, json=BODY) as response:
            assert response.status == 500
        shown = samples((await families(session))["miniinfer:log_records_dropped"])
    assert SafeLogger.dropped > dropped
    assert shown[()] > dropped


async def test_a_full_disk_stops_no_engine(tiny_model, full_disk):
    from miniinfer import AsyncLLM, EngineArgs, SamplingParams

    args = EngineArgs(model=str(tiny_model), num_kv_blocks=16, max_model_len=64)
    llm = await asyncio.to_thread(AsyncLLM.from_args, args)
    try:
        run, llm.engine.runner.run = llm.engine.runner.run, lambda buffers: 1 / 0
        [failed] = [o async for o in llm.generate("a", SamplingParams(max_tokens=1))]
        assert failed.outputs[0].finish_reason == "error"
        llm.engine.runner.run = run
        outputs = [o async for o in llm.generate("a", SamplingParams(max_tokens=1))]
        assert outputs[-1].finished
    finally:
        await llm.close()


def test_a_safe_logger_is_the_logger_of_its_name():
    logger = safe_logger("miniinfer.test.safe")
    assert logger is logging.getLogger("miniinfer.test.safe")
    assert safe_logger("miniinfer.test.safe") is logger


def record_of(message, **extra):
    record = logging.LogRecord("miniinfer.x", logging.INFO, "", 0, message, (), None)
    record.__dict__.update(extra)
    return record


def test_a_line_cannot_be_forged():
    line = LineFormatter().format(record_of("a\r\nERROR forged\x1b[31m\u2028\x9b1m tab\t"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith("a\\r\\nERROR forged\\x1b[31m\\u2028\\x9b1m tab\t")


def test_json_lines():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = record_of("a\nb")
        record.exc_info = sys.exc_info()
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "a\nb"
    assert entry["level"] == "info"
    assert "ValueError" in entry["exception"]
    fields = json.loads(JsonFormatter().format(record_of("m", fields={"id": "\n", "status": 1})))
    assert (fields["id"], fields["status"]) == ("\n", 1)
    assert "\n" not in JsonFormatter().format(record)


@pytest.mark.parametrize("value", ["a\r\nX-Injected: 1", "\x1b[31m", "x" * 129, "ä", "a b", ""])
async def test_a_request_id_that_is_not_plain_is_replaced(engine, value):
    async with serving(engine) as session:
        port = session._base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = ("GET /version HTTP/1.1", "Host: x", f"X-Request-Id: {value}", "Connection: close")
        writer.write("\r\n".join((*lines, "", "")).encode())
        answer_ = (await reader.read()).decode()
        writer.close()
    head, _, _ = answer_.partition("\r\n\r\n")
    assert "\x1b" not in head
    assert "x-injected" not in head.lower()
    if " 200 " in head:
        # An id of our own, or the harmless part of one that had a line break.
        assert re.search(r"^x-request-id: (?:a|[0-9a-f]{32})\r?$", head, re.I | re.M)


async def test_a_model_name_cannot_break_out(client, engine):
    name = "x\r\nSet-Cookie: a\x1b[31m"
    async with client.post(CHAT, json={**BODY, "model": name}) as response:
        assert response.status == 404
        assert "Set-Cookie" not in response.headers
        assert "\x1b" not in (await response.json())["error"]["message"]


async def test_traces(start, engine):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine.script = lambda ids, params: answer(params, ["a", "b"], cached=2)
    client = await start(engine, tracing=Tracing(provider))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent, "X-Request-Id": "r1"}
    async with client.post(CHAT, json={**BODY, "stream": True}, headers=headers) as response:
        await read_events(response)
    engine.refuse = RuntimeError("a defect")
    async with client.post(CHAT, json=BODY, headers={"traceparent": "garbage"}) as response:
        assert response.status == 500
    while len(exporter.get_finished_spans()) < 2:
        await asyncio.sleep(0.005)
    good, bad = exporter.get_finished_spans()
    assert good.name == f"POST {CHAT}"
    assert f"{good.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{good.parent.span_id:016x}" == parent.split("-")[2]
    assert [event.name for event in good.events] == ["submitted", "first_token"]
    assert good.start_time <= good.events[0].timestamp <= good.events[1].timestamp <= good.end_time
    assert good.attributes["gen_ai.request.id"] == "r1"
    assert good.attributes["gen_ai.usage.output_tokens"] == 2
    assert good.attributes["http.response.status_code"] == 200
    assert bad.parent is None
    assert bad.status.status_code is StatusCode.ERROR
    for span in (good, bad):
        assert SECRET not in span.to_json()


async def test_traces_leave_for_a_collector(start, engine):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    came = []

    async def collect(request):
        assert request.content_type == "application/x-protobuf"
        came.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    engine.script = lambda ids, params: answer(params, ["a", "b"])
    async with TestServer(app) as collector:
        tracing = await asyncio.to_thread(
            Tracing.to_endpoint, str(collector.make_url("/v1/traces"))
        )
        client = await start(engine, tracing=tracing)
        trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
        async with client.post(CHAT, json={**BODY, "stream": True}, headers=headers) as response:
            await read_events(response)
        # The span is made when the handler is over, and sent at the latest by `close`.
        await client.close()
        await asyncio.to_thread(tracing.close)
    [exported] = came
    [resource] = exported.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "miniinfer"
    [span] = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == (f"POST {CHAT}", trace_id)
    assert span.parent_span_id.hex() == parent_id
    assert [event.name for event in span.events] == ["submitted", "first_token"]
    numbers = {item.key: item.value.int_value for item in span.attributes}
    assert numbers["gen_ai.usage.output_tokens"] == 2
    assert SECRET.encode() not in exported.SerializeToString()


async def test_a_trace_that_fails_breaks_no_request(start, engine):
    class Broken:
        def finish(self, *arguments):
            raise OSError("no collector")

        def close(self):
            pass

    client = await start(engine, tracing=Broken())
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 200


def test_traces_need_the_sdk(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match="opentelemetry-sdk"):
        Tracing.to_endpoint("http://127.0.0.1:1")


def test_nothing_is_imported_for_traces_that_nobody_asked_for():
    import subprocess

    code = "import sys, miniinfer.server.run; print([m for m in sys.modules if 'telemetry' in m])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
