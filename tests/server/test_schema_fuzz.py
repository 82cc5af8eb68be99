"""Requests that schemathesis makes of /openapi.json, valid and not, to every route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from aiohttp import web
from schemathesis.config import (
    ChecksConfig,
    GenerationConfig,
    PositiveDataAcceptanceConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from miniinfer.server.app import make_app
from miniinfer.server.config import ServerConfig
from miniinfer.server.openapi import OpenApi
from miniinfer.server.routes import ROUTES
from miniinfer.server.runner import Runner

from .fake import FakeEngine, answer, logprob
from .real import PATIENCE

EXAMPLES = 20
DOCUMENT = OpenApi(ROUTES, keys=False).document()


def config(*modes: GenerationMode) -> SchemathesisConfig:
    """The same requests in every run, nothing written to disk, and the checks that can hold."""
    checks = ChecksConfig(
        # What fits the schema may still be refused: it cannot say how long a prompt is in tokens,
        # which tokens there are, which names a model has, nor what goes together.
        positive_data_acceptance=PositiveDataAcceptanceConfig(enabled=False),
    )
    generation = GenerationConfig(
        modes=list(modes), max_examples=EXAMPLES, deterministic=True, database="none"
    )
    project = ProjectConfig(checks=checks, generation=generation)
    return SchemathesisConfig(seed=1, projects=ProjectsConfig(default=project))


schema = schemathesis.openapi.from_dict(DOCUMENT, config=config(*GenerationMode))
streams = schemathesis.openapi.from_dict(DOCUMENT, config=config(GenerationMode.POSITIVE))
STREAMING = [route.path for route in ROUTES if route.events is not None]


def script(ids, params):
    """Answers in parts where they are asked for, with scores of the prompt if so."""
    steps = answer(params, ["Hel", "lo 🙂"])
    if params.prompt_logprobs is not None:
        steps[0].prompt_logprobs = [None] + [logprob("a", 1) for _ in ids[1:]]
    return steps


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own, as schemathesis' client blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fuzzed server")
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE)

    async def start() -> Runner:
        engine = loop.create_future()
        engine.set_result(FakeEngine(script))
        runner = Runner(make_app(engine, ServerConfig(stats_interval=0)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = run(start())
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    run(runner.cleanup())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@schema.parametrize()
@hypothesis.settings(deadline=None)
def test_every_answer_is_as_described(case: schemathesis.Case, url: str) -> None:
    check(case, case.call(base_url=url))


@streams.include(path=STREAMING, method="POST").parametrize()
@hypothesis.settings(deadline=None)
def test_every_event_is_as_described(case: schemathesis.Case, url: str) -> None:
    if isinstance(case.body, dict):
        case.body["stream"] = True
    check(case, case.call(base_url=url))


def check(case: schemathesis.Case, response: schemathesis.Response) -> None:
    """The answer's status, headers and body, or its events, are what the description says."""
    [content_type] = response.headers.get("content-type", [""])
    if content_type.startswith("text/event-stream"):
        check_events(case, response.content.decode())
        # It would hold each event to the schema of the whole stream, which is text.
        case.validate_response(response, excluded_checks=[response_schema_conformance])
    else:
        case.validate_response(response)


def check_events(case: schemathesis.Case, body: str) -> None:
    """Each event of a stream is what the description says."""
    responses = DOCUMENT["paths"][case.path][case.method.lower()]["responses"]
    event_schema = responses["200"]["content"]["text/event-stream"]["x-event"]
    validator = jsonschema.Draft202012Validator(
        {**event_schema, "components": DOCUMENT["components"]}
    )
    lines = [line[len("data: ") :] for line in body.splitlines() if line.startswith("data: ")]
    assert lines
    for line in lines:
        if line != "[DONE]":
            validator.validate(json.loads(line))
