"""/openapi.json: a valid document, and a true one."""

from __future__ import annotations

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from miniinfer.server.routes import ROUTES

from .fake import answer, logprob, spoken
from .sse_client import read_events

CHAT = {"messages": [{"role": "user", "content": "hey"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
async def document(client):
    async with client.get("/openapi.json") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        return await response.json()


def validator(document, schema):
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


async def test_it_is_valid_openapi_3_1(document):
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()


async def test_it_covers_every_route(client, document):
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in client.app.router.routes()
        if route.method != "HEAD"
    }
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert described == served
    assert len(served) == len(ROUTES)
    operations = [o["operationId"] for item in document["paths"].values() for o in item.values()]
    assert len(set(operations)) == len(operations)


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_it_says_whether_a_key_is_needed(start, engine, keys):
    client = await start(engine, api_keys=keys)
    async with client.get("/openapi.json", headers={"X-Api-Key": "secret"}) as response:
        paths = (await response.json())["paths"]
    assert ({} in paths["/v1/models"]["get"]["security"]) == (not keys)
    assert "security" not in paths["/health"]["get"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("post", "/v1/chat/completions", CHAT, 200),
        ("post", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, 200),
        ("post", "/v1/chat/completions", {**CHAT, "tools": TOOLS, "return_token_ids": True}, 200),
        ("post", "/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}, 200),
        ("post", "/v1/chat/completions", {**CHAT, "n": 0}, 400),
        ("post", "/v1/chat/completions", {**CHAT, "model": "x"}, 404),
        ("post", "/v1/completions", {"prompt": ["a", [97]], "logprobs": 1, "echo": True}, 200),
        ("post", "/v1/completions", {"prompt": "a", "prompt_logprobs": 0}, 200),
        ("post", "/generate", {"prompt": "a"}, 200),
        ("post", "/generate", {}, 400),
        ("post", "/tokenize", {"prompt": "a", "return_token_strs": True}, 200),
        ("post", "/tokenize", CHAT, 200),
        ("post", "/detokenize", {"tokens": [97]}, 200),
        ("get", "/v1/models", None, 200),
        ("get", "/v1/models/fake-model", None, 200),
        ("get", "/v1/models/x", None, 404),
        ("get", "/health", None, 200),
        ("get", "/healthz", None, 200),
        ("get", "/version", None, 200),
        ("get", "/load", None, 200),
    ],
)
async def test_bodies_and_answers_are_as_described(
    client, engine, document, method, path, body, status
):
    engine.script = script
    described = path.replace("fake-model", "{id}").replace("models/x", "models/{id}")
    operation = document["paths"][described][method]
    if status == 200 and body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator(document, schema).validate(body)
    async with client.request(method, path, json=body) as response:
        assert response.status == status
        found = await response.json()
    described_answer = operation["responses"][str(status)]
    assert "X-Request-Id" in described_answer["headers"]
    schema = described_answer["content"]["application/json"]["schema"]
    validator(document, schema).validate(found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "return_token_ids": True}),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}),
        ("/generate", {"prompt": "a", "return_token_ids": True}),
    ],
)
async def test_events_are_as_described(client, engine, document, path, body):
    engine.script = script
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    check = validator(document, content["text/event-stream"]["x-event"])
    async with client.post(path, json={**body, "stream": True}) as response:
        events = await read_events(response)
    assert len(events) > 1
    for event in events:
        check.validate(event)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 129},
        {"temperature": -1},
        {"temperature": 2.5},
        {"top_p": 0},
        {"top_logprobs": 21},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"response_format": {"type": "xml"}},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tool_choice": "always", "tools": TOOLS},
        {"reasoning_effort": "extreme"},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"cache_salt": ""},
        {"seed": 2**64},
        {"logit_bias": {"x": 1}},
        {"audio": {}},
    ],
)
async def test_what_the_description_rules_out_is_refused(client, document, fields):
    operation = document["paths"]["/v1/chat/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert not validator(document, schema).is_valid({**CHAT, **fields})
    async with client.post("/v1/chat/completions", json={**CHAT, **fields}) as response:
        assert response.status == 400


def script(ids, params):
    """Answers with everything that can be asked for."""
    calls = [[("reasoning", "r")], [("tool_call", 0, "f"), ("arguments", 0, "{}")]]
    steps = spoken(params, calls) if params.max_tokens != 16 else answer(params, ["a", "b"])
    if params.prompt_logprobs is not None:
        steps[0].prompt_logprobs = [None] + [logprob("a", 1) for _ in ids[1:]]
    return steps
