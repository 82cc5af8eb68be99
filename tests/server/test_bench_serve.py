"""The load client against the scripted server: what it sends, when, and what it makes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import xml.etree.ElementTree as ET

import pytest
from aiohttp import web

from miniinfer.bench.serve import CannotMeasure, LoadSettings, run_load
from miniinfer.bench.serve_load import bodies_from_file, poisson_arrivals, random_bodies
from miniinfer.bench.serve_plot import page
from miniinfer.bench.serve_report import figures, percentile, samples, table
from miniinfer.cli import main

from .fake import FakeDelta, Pause, answer
from .serving import serving


def url_of(session):
    return str(session._base_url).rstrip("/")


def talk(ids, params):
    return answer(params, ["a", "b", "c", "d"], prompt=len(ids))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 500.0}])
async def test_a_run(engine, endpoint, load):
    engine.script = talk
    engine.max_model_len = 10_000
    async with serving(engine) as session:
        settings = LoadSettings(
            url=url_of(session), endpoint=endpoint, num_requests=20, num_warmup=2, **load
        )
        run = await run_load(settings)
    assert len(engine.requests) == 22
    found = figures(run)
    assert found["requests"] == found["succeeded"] == 20
    assert found["errors"] == {}
    assert found["model"] == "fake-model"
    assert found["output_tokens"] == 80
    assert found["prompt_tokens"] == sum(len(r.token_ids) for r in engine.requests[2:])
    assert len(samples(run)["itl"]) == 60
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = [found[f"{name}_p{percent}_ms"] for percent in (50, 90, 95, 99)]
        assert values == sorted(values)
        assert values[0] > 0
        assert f"{found[f'{name}_p99_ms']:.2f}" in table(found)
    assert all(r.started <= r.arrivals[0] <= r.arrivals[-1] <= r.ended for r in run.results)


async def test_a_closed_loop_has_so_many_at_once(engine):
    pause = Pause()
    engine.script = lambda ids, params: [pause, *talk(ids, params)]
    engine.max_model_len = 10_000
    async with serving(engine) as session:
        settings = LoadSettings(
            url=url_of(session), concurrency=3, num_requests=9, num_warmup=0, model="fake-model"
        )
        task = asyncio.create_task(run_load(settings))
        while len(engine.requests) < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 3
        pause.go.set()
        assert figures(await task)["succeeded"] == 9


async def test_an_open_loop_waits_for_nobody(engine):
    pause = Pause()
    engine.script = lambda ids, params: [pause, *talk(ids, params)]
    engine.max_model_len = 10_000
    async with serving(engine) as session:
        settings = LoadSettings(url=url_of(session), rate=1000.0, num_requests=9, num_warmup=0)
        task = asyncio.create_task(run_load(settings))
        while len(engine.requests) < 9:
            await asyncio.sleep(0.005)
        pause.go.set()
        assert figures(await task)["succeeded"] == 9


def events(*lines, status=200):
    async def handler(request):
        body = "".join(f"data: {line}\n\n" for line in lines)
        return web.Response(status=status, text=body, content_type="text/event-stream")

    return handler


TEXT = json.dumps({"choices": [{"delta": {"content": "a"}}]})


async def hang(request):
    await asyncio.sleep(3600)


async def reset(request):
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (events(status=429), "HTTP 429"),
        (events(status=500), "HTTP 500"),
        (events(TEXT), "cut off"),
        (events("[DONE]"), "no text"),
        (events("{", "[DONE]"), "not a stream of OpenAI's"),
        (events("[]", "[DONE]"), "not a stream of OpenAI's"),
        (events(TEXT, '{"error": {"code": "engine_dead"}}', "[DONE]"), "stream error: engine_dead"),
        (hang, "timeout"),
        (reset, "connection: ServerDisconnectedError"),
    ],
)
async def test_failures_are_counted_by_kind(handler, kind):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        settings = LoadSettings(
            url=f"http://127.0.0.1:{port}",
            model="m",
            concurrency=2,
            num_requests=3,
            num_warmup=0,
            timeout=0.5,
        )
        found = figures(await run_load(settings))
        assert found["errors"] == {kind: 3}
        assert found["succeeded"] == 0
        assert kind in table(found)
        with pytest.raises(CannotMeasure, match="warm up"):
            await run_load(LoadSettings(**{**fields_of(settings), "num_warmup": 1}))
    finally:
        await runner.cleanup()


def fields_of(settings):
    return {name: getattr(settings, name) for name in LoadSettings.__dataclass_fields__}


async def test_a_server_without_usage_is_counted_by_events():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", events(TEXT, TEXT, "[DONE]"))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        settings = LoadSettings(url=url, model="m", concurrency=1, num_requests=2, num_warmup=0)
        assert figures(await run_load(settings))["output_tokens"] == 4
    finally:
        await runner.cleanup()


async def test_a_refusal_is_told_in_the_servers_words(engine):
    engine.script = talk
    engine.max_model_len = 10_000
    async with serving(engine) as session:
        settings = LoadSettings(
            url=url_of(session), model="nope", concurrency=1, num_requests=2, num_warmup=0
        )
        found = figures(await run_load(settings))
        assert found["errors"] == {"HTTP 404": 2}
        reason = found["error_reasons"]["HTTP 404"]
        assert "nope" in reason
        assert f"2 x HTTP 404: {reason}" in table(found)
        with pytest.raises(CannotMeasure, match=f"^a request to warm up failed: {reason}$"):
            await run_load(LoadSettings(**{**fields_of(settings), "num_warmup": 1}))


async def test_keys_and_more_fields_are_sent(start, engine):
    from miniinfer.server.keys import ApiKey

    engine.script = talk
    engine.max_model_len = 10_000
    async with serving(engine, api_keys=(ApiKey.of("k"),)) as session:
        settings = LoadSettings(
            url=url_of(session),
            api_key="k",
            concurrency=1,
            num_requests=1,
            num_warmup=0,
            extra_body={"ignore_eos": True},
        )
        assert figures(await run_load(settings))["succeeded"] == 1
        assert engine.requests[0].params.ignore_eos
        hint = r"/v1/models answers 401: .*\(here --api-key KEY, or MINIINFER_API_KEY\)$"
        with pytest.raises(CannotMeasure, match=hint):
            await run_load(LoadSettings(**{**fields_of(settings), "api_key": "other"}))


def test_random_prompts_differ_and_repeat():
    bodies = random_bodies(5, 20, 7, "chat", seed=3, shared_words=8)
    texts = [body["messages"][0]["content"].split() for body in bodies]
    assert all(len(text) == 20 for text in texts)
    assert len({tuple(text[:8]) for text in texts}) == 1
    assert len({tuple(text) for text in texts}) == 5
    assert bodies == random_bodies(5, 20, 7, "chat", seed=3, shared_words=8)
    assert all(body["max_tokens"] == 7 and body["stream"] for body in bodies)


def test_prompts_from_files(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo 😀\n")
    bodies = bodies_from_file(lines, 3, 5, "completions")
    assert [body["prompt"] for body in bodies] == ["one", "two 😀", "one"]
    entries = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    entries.write_text(
        f'{{"prompt": "a", "max_tokens": 9}}\n{json.dumps({"messages": messages})}\n'
    )
    first, second = bodies_from_file(entries, 2, 5, "chat")
    assert (first["messages"][0]["content"], first["max_tokens"]) == ("a", 9)
    assert (second["messages"], second["max_tokens"]) == (messages, 5)
    with pytest.raises(ValueError, match="chat endpoint"):
        bodies_from_file(entries, 2, 5, "completions")


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": "a", "messages": []}'])
def test_bad_files_name_the_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        bodies_from_file(path, 2, 5, "chat")


def test_arrivals_have_the_rate():
    arrivals = list(poisson_arrivals(10.0, 20_000, seed=1))
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # An exponential distribution's mean is its standard deviation.
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert arrivals[0] == 0.0


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5], 99, 5),
        ([3, 1, 2, 4], 50, 2),
        ([3, 1, 2, 4], 51, 3),
        (range(1, 101), 99, 99),
        ([1, 2], 0, 1),
    ],
)
def test_percentiles(values, percent, expected):
    assert percentile(list(values), percent) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rate": 1.0, "concurrency": 1},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"concurrency": 0},
        {"concurrency": 1, "num_requests": 0},
        {"concurrency": 1, "num_warmup": -1},
        {"concurrency": 1, "endpoint": "x"},
        {"concurrency": 1, "timeout": float("inf")},
    ],
)
def test_bad_settings(fields):
    with pytest.raises(ValueError, match=r"must|set either"):
        LoadSettings(url="http://x", **fields)


async def test_the_command_writes_json_and_a_page(engine, tmp_path, capsys):
    engine.script = talk
    engine.max_model_len = 10_000
    engine.model_name = "<model> & co"
    files = {"--json": tmp_path / "f.json", "--html": tmp_path / "f.html"}
    async with serving(engine) as session:
        arguments = ["bench", "serve", "--url", url_of(session) + "/v1/", "--num-requests", "5"]
        arguments += [str(part) for pair in files.items() for part in pair]
        assert await asyncio.to_thread(main, arguments) == 0
    found = json.loads(files["--json"].read_text())
    assert found["succeeded"] == 5
    assert "5 of 5 requests" in capsys.readouterr().out
    text = files["--html"].read_text()
    assert "<model>" not in text
    assert "http" not in text.replace("http-equiv", "")
    for piece in text.split("<svg")[1:]:
        svg = ET.fromstring("<svg" + piece.partition("</svg>")[0] + "</svg>")
        assert len(svg) > 10
    assert text.count("<svg") == 5


async def test_the_command_without_success_is_a_failure(engine, capsys):
    engine.script = lambda ids, params: [FakeDelta("", finish_reason="error", error="no")]
    engine.max_model_len = 10_000
    async with serving(engine) as session:
        arguments = ["bench", "serve", "--url", url_of(session), "--num-warmup", "0"]
        assert await asyncio.to_thread(main, [*arguments, "--num-requests", "2"]) == 1
    assert "2 x HTTP 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "before"), [([], ""), (["--model", "m"], "a request to warm up failed: ")]
)
def test_the_command_without_a_server(flags, before, capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *flags]) == 1
    reason = "cannot reach the server at 127.0.0.1:9: Connection refused"
    assert capsys.readouterr().err == f"miniinfer: error: {before}{reason}\n"


def test_the_command_without_its_prompts(tmp_path, capsys):
    path = tmp_path / "absent"
    assert main(["bench", "serve", "--prompts", str(path)]) == 1
    reason = f"cannot read the prompts in {str(path)!r}: No such file or directory"
    assert capsys.readouterr().err == f"miniinfer: error: {reason}\n"
    path.write_bytes(b"\xff")
    assert main(["bench", "serve", "--prompts", str(path)]) == 1
    assert f"the prompts in {str(path)!r}: it is not UTF-8 text" in capsys.readouterr().err


def test_a_page_without_success_has_no_distributions():
    from miniinfer.bench.serve import LoadRun
    from miniinfer.bench.serve_client import RequestResult

    run = LoadRun([RequestResult(0.0, 1.0, error="timeout")], 1.0, "m")
    assert page(run, figures(run)).count("<svg") == 1
