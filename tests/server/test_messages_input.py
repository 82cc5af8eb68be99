"""What /v1/messages makes of its input, what it refuses, and how it fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anthropic
import pytest
from anthropic.types.shared import ErrorResponse

from miniinfer.server.run import drain
from miniinfer.server.state import STATE

from .fake import FakeDelta, Pause, answer
from .named_events import parse_named_events, read_named_events
from .said import PARSERS

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hey"}
BODY: dict[str, Any] = {"max_tokens": 10, "messages": [USER]}
TOOL = {"name": "roll", "input_schema": {"type": "object"}}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "roll", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "6"}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def call(call_id: str) -> dict[str, Any]:
    function = {"name": "roll", "arguments": {"a": 1}}
    return {"id": call_id, "type": "function", "function": function}


async def template_saw(client, engine, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    engine.max_model_len = 1000
    async with client.post(URL, json=BODY | fields) as response:
        assert response.status == 200, await response.text()
    return engine.tokenizer.chats[-1]


async def error_of(response) -> dict[str, str]:
    body = await response.json()
    ErrorResponse.model_validate(body)
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({}, [USER]),
        ({"messages": [user(*text("hey"))]}, [USER]),
        ({"messages": [user(*text("a", "b"))]}, [user(*text("a", "b"))]),
        ({"messages": [USER, USER]}, [user(*text("hey", "hey"))]),
        ({"system": "s"}, [{"role": "system", "content": "s"}, USER]),
        ({"system": text("s")}, [{"role": "system", "content": "s"}, USER]),
        ({"system": text("s", "t")}, [{"role": "system", "content": text("s", "t")}, USER]),
        ({"system": ""}, [USER]),
        (
            {"messages": [USER, {"role": "system", "content": "now"}, USER]},
            [USER, {"role": "system", "content": "now"}, USER],
        ),
        (
            {"messages": [USER, assistant(*text("a", "b")), assistant(*text("c")), USER]},
            [USER, {"role": "assistant", "content": "abc"}, USER],
        ),
        (
            {
                "messages": [
                    USER,
                    assistant(
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "secret"},
                        *text("wait"),
                        TOOL_USE,
                        {**TOOL_USE, "id": "t2"},
                    ),
                    user(RESULT, {**RESULT, "tool_use_id": "t2", "content": text("4", "5")}),
                ]
            },
            [
                USER,
                {
                    "role": "assistant",
                    "content": "wait",
                    "reasoning_content": "hm",
                    "tool_calls": [call("t1"), call("t2")],
                },
                {"role": "tool", "content": "6", "tool_call_id": "t1"},
                {"role": "tool", "content": "45", "tool_call_id": "t2"},
            ],
        ),
        (
            {"messages": [USER, assistant(TOOL_USE), user(*text("a"), RESULT, *text("b"))]},
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [call("t1")]},
                {"role": "user", "content": "a"},
                {"role": "tool", "content": "6", "tool_call_id": "t1"},
                {"role": "user", "content": "b"},
            ],
        ),
        (
            {
                "messages": [
                    USER,
                    assistant(TOOL_USE),
                    user({"type": "tool_result", "tool_use_id": "t1"}),
                ]
            },
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [call("t1")]},
                {"role": "tool", "content": "", "tool_call_id": "t1"},
            ],
        ),
    ],
)
async def test_messages(client, engine, fields, messages):
    seen, options = await template_saw(client, engine, **fields)
    assert seen == messages
    assert options["add_generation_prompt"]
    assert not options["continue_final_message"]


async def test_a_last_message_of_the_assistant_is_continued(client, engine):
    prefill = {"role": "assistant", "content": "The answer is ("}
    seen, options = await template_saw(client, engine, messages=[USER, prefill])
    assert seen == [USER, prefill]
    assert options["continue_final_message"]
    assert not options["add_generation_prompt"]


async def test_sampling_parameters_arrive(client, engine):
    await template_saw(
        client,
        engine,
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        stop_sequences=["END", "STOP"],
        metadata={"user_id": "u1"},
    )
    [request] = engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.75, 3)
    assert params.stop == ["END", "STOP"]
    assert params.max_tokens == 10
    assert request.options["tenant"].endswith("/u1")


@pytest.mark.parametrize(
    ("thinking", "seen"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
async def test_thinking_reaches_the_template(client, engine, thinking, seen):
    _, options = await template_saw(client, engine, thinking=thinking)
    assert options.get("enable_thinking") is seen


async def test_effort_reaches_the_template(client, engine):
    _, options = await template_saw(client, engine, output_config={"effort": "low"})
    assert options["reasoning_effort"] == "low"


async def test_tools_reach_the_template(start, engine):
    client = await start(engine, **PARSERS)
    _, options = await template_saw(
        client, engine, tools=[{**TOOL, "type": "custom", "description": "Roll.", "strict": True}]
    )
    function = {
        "name": "roll",
        "description": "Roll.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert options["tools"] == [{"type": "function", "function": function}]
    _, options = await template_saw(client, engine, tools=[TOOL], tool_choice={"type": "none"})
    assert not options.get("tools")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "roll"}])
async def test_a_demanded_tool_use_is_enforced(start, engine, choice):
    client = await start(engine, **PARSERS)
    engine.script = lambda ids, params: [
        FakeDelta(parts=[("tool_call", 0, "roll"), ("arguments", 0, "{}")], finish_reason="stop")
    ]
    async with client.post(URL, json=BODY | {"tools": [TOOL], "tool_choice": choice}) as response:
        assert (await response.json())["stop_reason"] == "tool_use"
    assert engine.requests[0].params.structured_outputs is not None


async def test_parallel_tool_use_can_be_disabled(start, engine):
    client = await start(engine, **PARSERS)
    parts = [part for n in (0, 1) for part in (("tool_call", n, "roll"), ("arguments", n, "{}"))]
    engine.script = lambda ids, params: [FakeDelta(parts=parts, finish_reason="stop")]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with client.post(URL, json=BODY | {"tools": [TOOL], "tool_choice": choice}) as response:
        body = await response.json()
    assert len(body["content"]) == 1


async def test_a_form_of_the_text_is_enforced(start, engine):
    client = await start(engine, **PARSERS)
    await template_saw(client, engine, output_config={"format": FORM})
    assert engine.requests[0].params.structured_outputs is not None


FORM = {"type": "json_schema", "schema": {"type": "object"}}
OF_BOTH = [
    ({"messages": []}, "at least one"),
    ({"messages": "hey"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [user()]}, "messages[0].content"),
    ({"messages": [user({"type": "image", "source": {}})]}, "'image'"),
    ({"messages": [user({"type": "document"})]}, "'document'"),
    (
        {"messages": [user({"type": "text"})]},
        "messages[0].content[0]: object missing required field text",
    ),
    ({"messages": [user(TOOL_USE)]}, "'tool_use'"),
    ({"messages": [USER, assistant(RESULT)]}, "'tool_result'"),
    ({"messages": [USER, assistant({**TOOL_USE, "id": None})]}, "[0].id"),
    ({"messages": [USER, assistant({**TOOL_USE, "input": "{}"})]}, "input"),
    ({"messages": [user(RESULT)]}, "'t1'"),
    (
        {
            "messages": [
                USER,
                assistant(TOOL_USE),
                user({**RESULT, "content": [{"type": "image"}]}),
            ]
        },
        "'image'",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": [{"text": "Be brief."}]}, "system[0]: object missing required field type"),
    ({"system": 3}, "system"),
    ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "bash_20250124"),
    ({"tools": [{"name": "roll"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "unique"),
    ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "perhaps"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}}, "fly"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"thinking": {"type": "loudly"}}, "loudly"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "thinking.budget_tokens must be at least 1, got -1",
    ),
    ({"thinking": {"type": "disabled", "budget_tokens": 0}}, "got 0"),
]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        *OF_BOTH,
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "3"),
        ({"top_p": 7}, "7"),
        ({"top_k": -3}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"metadata": "u"}, "metadata"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"output_config": {"effort": "colossal"}}, "colossal"),
        *(
            ({"output_config": {"format": FORM}, "tools": [TOOL], "tool_choice": choice}, "tools")
            for choice in (None, {"type": "any"}, {"type": "tool", "name": "roll"})
        ),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "xml"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "103"),
    ],
)
async def test_a_bad_request_says_what_is_wrong(start, engine, fields, word):
    client = await start(engine, **PARSERS)
    for stream in (False, True):
        async with client.post(URL, json={**BODY, "stream": stream, **fields}) as response:
            assert response.status == 400
            error = await error_of(response)
        assert error["type"] == "invalid_request_error"
        assert word in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(("fields", "word"), OF_BOTH)
async def test_a_bad_prompt_is_not_counted(start, engine, fields, word):
    client = await start(engine, **PARSERS)
    async with client.post(COUNT, json={"messages": [USER], **fields}) as response:
        assert response.status == 400
        assert word in (await error_of(response))["message"]


@pytest.mark.parametrize("missing", ["max_tokens", "messages"])
async def test_a_missing_parameter_is_named(client, missing):
    body = {key: value for key, value in BODY.items() if key != missing}
    async with client.post(URL, json=body) as response:
        assert response.status == 400
        assert missing in (await error_of(response))["message"]


async def test_errors_of_every_status_have_anthropics_shape(start, engine):
    client = await start(engine, api_keys=("key",), max_body_size=1000)
    headers = {"X-Api-Key": "key"}

    async def error(status: int, method: str = "POST", path: str = URL, **options: Any) -> str:
        async with client.request(method, path, **{"headers": headers, **options}) as response:
            assert response.status == status
            return (await error_of(response))["type"]

    assert await error(400, data=b"{") == "invalid_request_error"
    assert await error(401, json=BODY, headers={}) == "authentication_error"
    assert await error(401, json=BODY, headers={"X-Api-Key": "kez"}) == "authentication_error"
    assert await error(404, json=BODY | {"model": "claude"}) == "not_found_error"
    assert await error(404, path=f"{URL}/batches") == "not_found_error"
    for path in ("/messages", f"/x{URL}", f"/v1{URL}", f"/x{URL}/count_tokens"):
        assert await error(404, path=path) == "not_found_error"
    assert await error(405, method="GET") == "invalid_request_error"
    engine.script = lambda ids, params: [RuntimeError("a defect")]
    assert await error(500, json=BODY) == "api_error"
    engine.die()
    assert await error(503, json=BODY) == "overloaded_error"


async def test_a_body_that_is_too_large(start, engine):
    client = await start(engine, max_body_size=100)
    async with client.post(URL, json=BODY | {"system": "x" * 200}) as response:
        assert response.status == 413
        body = await response.json()
    # The client's own types have no such error, though the API does.
    assert body["error"]["type"] == "request_too_large"


async def test_both_kinds_of_key_are_taken(start, engine):
    client = await start(engine, api_keys=("key",))
    for headers in ({"X-Api-Key": "key"}, {"Authorization": "Bearer key"}):
        async with client.post(URL, json=BODY, headers=headers) as response:
            assert response.status == 200
            assert response.headers["request-id"] == response.headers["X-Request-Id"]


@pytest.mark.parametrize("path", [URL, f"{URL}/count_tokens"])
async def test_a_base_url_with_the_version_is_told_to_leave_it_out(client, path):
    async with client.post(f"/v1{path}", json=BODY) as response:
        assert response.status == 404
        assert response.headers["request-id"] == response.headers["X-Request-Id"]
        error = await error_of(response)
    assert error["type"] == "not_found_error"
    assert error["message"] == (
        f"no such route: POST /v1{path}; leave /v1 out of the base URL, the client adds it"
    )


async def test_other_routes_keep_their_own_errors(client):
    async with client.get("/v1/models/a/messages") as response:
        assert response.status == 404
        assert "type" not in await response.json()
    async with client.post("/v1/messagesandmore", json=BODY) as response:
        assert response.status == 404
        assert "type" not in await response.json()
        assert "request-id" not in response.headers


async def test_a_failure_in_the_middle_is_an_event(client, engine):
    engine.script = lambda ids, params: [
        FakeDelta("a", num_output_tokens=1),
        FakeDelta("", finish_reason="error", error="out of memory"),
    ]
    async with client.post(URL, json=BODY | {"stream": True}) as response:
        *_, error = await read_named_events(response)
    assert error == {
        "type": "error",
        "error": {"type": "api_error", "message": "out of memory"},
        "request_id": None,
    }
    assert engine.requests[0].stream.cancelled
    async with anthropic.AsyncAnthropic(
        base_url=str(client.make_url("/")), api_key="none", max_retries=0
    ) as official:
        with pytest.raises(anthropic.APIStatusError, match="out of memory"):
            async with official.messages.stream(model="fake-model", **BODY) as stream:
                await stream.get_final_message()


async def test_a_failure_after_a_ping_is_an_event(start, engine):
    client = await start(engine, keep_alive_interval=0.05)
    engine.script = lambda ids, params: [0.2, FakeDelta("", finish_reason="error", error="no")]
    async with client.post(URL, json=BODY | {"stream": True}) as response:
        [error] = parse_named_events(await response.text())
    assert error["error"] == {"type": "api_error", "message": "no"}


async def test_a_shutdown_ends_streams_with_an_event(client, engine):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause]
    response = await client.post(URL, json=BODY | {"stream": True})
    whole = asyncio.create_task(client.post(URL, json=BODY))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.005)
    await drain(client.app[STATE], 0.05)
    *_, error = await read_named_events(response)
    assert error["error"]["type"] == "overloaded_error"
    answered = await whole
    assert answered.status == 503
    assert (await error_of(answered))["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(client, engine, stream):
    pause = Pause()
    engine.script = lambda ids, params: [FakeDelta("a"), pause, *answer(params, ["b"])]
    task = asyncio.create_task(client.post(URL, json=BODY | {"stream": stream}))
    await pause.reached.wait()
    if stream:
        (await task).close()
    else:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    while client.app[STATE].num_active or not engine.requests[0].stream.cancelled:
        await asyncio.sleep(0.005)
