"""/openapi.json on the routes of items and blocks: what it says of bodies and events is true."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from .named_events import read_named_events
from .said import PARSERS, SAID

RESPONSES: dict[str, Any] = {"input": "hey"}
MESSAGES: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "hey"}]}
FULL_RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hey"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ],
    "instructions": "Be kind.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "auto",
    "metadata": {"a": "b"},
    "background": False,
}
FULL_MESSAGES = {
    "max_tokens": 20,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": "hey"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_k": 3,
}
COUNT = {key: value for key, value in FULL_MESSAGES.items() if key in ("messages", "tools")}


def checker(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


async def document_of(client) -> dict[str, Any]:
    async with client.get("/openapi.json") as response:
        return await response.json()


def operation_of(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    described = "/v1/responses/{id}" if path.startswith("/v1/responses/") else path
    return document["paths"][described][method]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", FULL_RESPONSES, 200),
        ("/v1/responses", RESPONSES | {"top_p": 2}, 400),
        ("/v1/responses", RESPONSES | {"model": "x"}, 404),
        ("/v1/messages", FULL_MESSAGES, 200),
        ("/v1/messages", MESSAGES | {"top_p": 2}, 400),
        ("/v1/messages", MESSAGES | {"model": "x"}, 404),
        ("/v1/messages/count_tokens", COUNT, 200),
        ("/v1/messages/count_tokens", {}, 400),
    ],
)
@pytest.mark.parametrize("name", ["everything", "cut in a call"])
async def test_bodies_and_answers(start, engine, path, body, status, name):
    client = await start(engine, **PARSERS)
    engine.max_model_len = 1000
    engine.script = SAID[name]
    document = await document_of(client)
    operation = operation_of(document, "post", path)
    accepted = operation["requestBody"]["content"]["application/json"]["schema"]
    if status == 200:
        checker(document, accepted).validate(body)
    async with client.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
    schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    checker(document, schema).validate(answer)


@pytest.mark.parametrize("method", ["get", "delete"])
async def test_stored_responses(client, method):
    document = await document_of(client)
    async with client.post("/v1/responses", json=RESPONSES) as response:
        path = f"/v1/responses/{(await response.json())['id']}"
    for status, target in ((200, path), (404, "/v1/responses/x")):
        async with client.request(method, target) as response:
            assert response.status == status
            answer = await response.json()
        described = operation_of(document, method, target)["responses"][str(status)]
        checker(document, described["content"]["application/json"]["schema"]).validate(answer)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", FULL_RESPONSES), ("/v1/messages", FULL_MESSAGES)]
)
@pytest.mark.parametrize("name", SAID)
async def test_events(start, engine, path, body, name):
    client = await start(engine, **PARSERS)
    engine.max_model_len = 1000
    engine.script = SAID[name]
    document = await document_of(client)
    content = operation_of(document, "post", path)["responses"]["200"]["content"]
    check = checker(document, content["text/event-stream"]["x-event"])
    async with client.post(path, json={**body, "stream": True}) as response:
        events = await read_named_events(response)
    assert len(events) > 4
    for event in events:
        check.validate(event)
    assert not check.is_valid({"type": "unheard.of"})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"temperature": 2.5}),
        ("/v1/responses", {"top_p": 0}),
        ("/v1/responses", {"max_output_tokens": 0}),
        ("/v1/responses", {"top_logprobs": 21}),
        ("/v1/responses", {"include": ["x"]}),
        ("/v1/responses", {"truncation": "x"}),
        ("/v1/responses", {"background": True}),
        ("/v1/responses", {"conversation": "c"}),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}),
        ("/v1/responses", {"tool_choice": "perhaps"}),
        ("/v1/responses", {"reasoning": {"effort": "x"}}),
        ("/v1/messages", {"max_tokens": 0}),
        ("/v1/messages", {"max_tokens": None}),
        ("/v1/messages", {"messages": [{"role": "wizard", "content": "a"}]}),
        ("/v1/messages", {"tools": [{"name": "f", "type": "bash"}]}),
        ("/v1/messages", {"tool_choice": {"type": "x"}}),
        ("/v1/messages", {"thinking": {"type": "x"}}),
        ("/v1/messages", {"stop_sequences": [""]}),
        ("/v1/messages", {"container": "c"}),
    ],
)
async def test_what_the_description_rules_out_is_refused(client, path, fields):
    document = await document_of(client)
    operation = operation_of(document, "post", path)
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = {**(RESPONSES if path == "/v1/responses" else MESSAGES), **fields}
    assert not checker(document, schema).is_valid(body)
    async with client.post(path, json=body) as response:
        assert response.status == 400
