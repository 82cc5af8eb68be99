"""What /v1/responses makes of its input: the chat that the template sees, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from miniinfer.server.state import STATE

from .fake import FakeDelta, FakeEngine, Pause, answer
from .named_events import parse_named_events, read_named_events
from .said import PARSERS

URL = "/v1/responses"
BODY = {"input": "hey"}
TOOL = {"type": "function", "name": "roll", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "roll", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "6"}


def text(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": each} for each in texts]


async def template_saw(client, engine: FakeEngine, **fields: Any) -> list[dict[str, Any]]:
    async with client.post(URL, json=BODY | fields) as response:
        assert response.status == 200, await response.text()
    messages, _ = engine.tokenizer.chats[-1]
    return messages


async def refused(client, body: dict[str, Any], param: str | None, *words: str) -> dict[str, Any]:
    async with client.post(URL, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error
    return error


USER = {"role": "user", "content": "hey"}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hey", [USER]),
        ([USER], [USER]),
        ([{**USER, "type": "message"}], [USER]),
        ([{"role": "user", "content": text("input_text", "hey")}], [USER]),
        (
            [{"role": "user", "content": text("input_text", "a", "b")}],
            [{"role": "user", "content": text("text", "a", "b")}],
        ),
        (
            [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, USER],
            [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, USER],
        ),
        (
            [USER, {"role": "assistant", "content": text("output_text", "a", "b")}, USER],
            [USER, {"role": "assistant", "content": "ab"}, USER],
        ),
        (
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
    ],
)
async def test_messages(client, engine, given, messages):
    engine.max_model_len = 1000
    assert await template_saw(client, engine, input=given) == messages


async def test_instructions_come_first(client, engine):
    messages = await template_saw(client, engine, instructions="Be kind.")
    assert messages == [{"role": "system", "content": "Be kind."}, USER]


def call(call_id: str) -> dict[str, Any]:
    function = {"name": "roll", "arguments": '{"a": 1}'}
    return {"id": call_id, "type": "function", "function": function}


async def test_one_answer_of_several_items_is_one_message(client, engine):
    given = [
        USER,
        {"type": "reasoning", "id": "r", "summary": [], "content": text("reasoning_text", "hm")},
        {"type": "message", "role": "assistant", "content": text("output_text", "wait")},
        CALL,
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": text("input_text", "4")},
        {"type": "reasoning", "id": "r", "summary": text("summary_text", "left out")},
        {"role": "assistant", "content": "done"},
        USER,
    ]
    assert await template_saw(client, engine, input=given) == [
        USER,
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [call("c1"), call("c2")],
        },
        {"role": "tool", "content": "6", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "assistant", "content": "done"},
        USER,
    ]


async def test_a_call_alone_and_thoughts_alone(client, engine):
    thought = {"type": "reasoning", "content": text("reasoning_text", "hm")}
    assert await template_saw(client, engine, input=[USER, CALL, OUTPUT, thought]) == [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
        {"role": "tool", "content": "6", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


async def test_tools_reach_the_template(start, engine):
    client = await start(engine, **PARSERS)
    full = {**TOOL, "description": "Roll a die.", "strict": True}
    await template_saw(client, engine, tools=[full])
    function = {key: value for key, value in full.items() if key != "type"}
    assert engine.tokenizer.chats[-1][1]["tools"] == [{"type": "function", "function": function}]


async def test_only_allowed_tools_reach_the_template(start, engine):
    client = await start(engine, **PARSERS)
    tools = [TOOL, {**TOOL, "name": "stop"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}
    await template_saw(client, engine, tools=tools, tool_choice=choice)
    [tool] = engine.tokenizer.chats[-1][1]["tools"]
    assert tool["function"]["name"] == "roll"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "roll"}])
async def test_a_demanded_call_is_enforced(start, engine, choice):
    client = await start(engine, **PARSERS)
    await template_saw(client, engine, tools=[TOOL], tool_choice=choice)
    assert engine.requests[0].params.structured_outputs is not None


async def test_a_form_of_the_text_is_enforced(start, engine):
    client = await start(engine, **PARSERS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
    ):
        await template_saw(client, engine, text={"format": form})
        assert engine.requests[-1].params.structured_outputs is not None


async def test_effort_reaches_the_template(client, engine):
    await template_saw(client, engine, reasoning={"effort": "high"})
    assert engine.tokenizer.chats[-1][1]["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": 1}, "input", ["int"]),
        ({"input": []}, "input", ["at least one"]),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input", ["input[0].role", "wizard"]),
        ({"input": [{"content": "a"}]}, "input", ["input[0].role", "None"]),
        ({"input": [{"role": "user"}]}, "input", ["input[0].content"]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            ["input[0].content[0].type", "input_image"],
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input",
            ["input[0].content[0].text"],
        ),
        ({"input": [{"type": "computer_call"}]}, "input", ["computer_call", "not supported"]),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", ["item_reference"]),
        ({"input": [USER, OUTPUT]}, "input", ["c1"]),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input", ["input[0].name"]),
        ({"input": [{"type": "function_call_output"}]}, "input", ["input[0].call_id"]),
        ({"input": [CALL, {**OUTPUT, "output": None}]}, "input", ["input[1].output"]),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input", ["'x'"]),
        ({"instructions": 3}, "instructions", ["int"]),
        ({"temperature": 3}, "temperature", ["2", "3"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"max_output_tokens": 0}, "max_output_tokens", ["max_output_tokens", "0"]),
        ({"max_output_tokens": 1000}, "max_output_tokens", ["64", "1000"]),
        ({"input": "x" * 100}, "input", ["64", "103"]),
        ({"top_logprobs": 3}, "top_logprobs", ["include"]),
        (
            {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
            "top_logprobs",
            ["20", "21"],
        ),
        ({"include": ["everything"]}, "include", ["everything"]),
        ({"truncation": "maybe"}, "truncation", ["maybe"]),
        ({"background": True}, "background", ["not supported"]),
        ({"conversation": "c"}, "conversation", ["not supported"]),
        ({"prompt": {"id": "p"}}, "prompt", ["not supported"]),
        ({"max_tool_calls": 1}, "max_tool_calls", ["not supported"]),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", ["16", "17"]),
        ({"metadata": {"k" * 65: ""}}, "metadata", ["64", "65"]),
        ({"metadata": {"k": "v" * 513}}, "metadata", ["512", "513"]),
        ({"metadata": {"k": 1}}, "metadata", ["str"]),
        ({"tools": [{"type": "web_search"}]}, "tools", ["tools[0].type", "web_search"]),
        ({"tools": [{"type": "function"}]}, "tools", ["tools[0].name"]),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", ["perhaps"]),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", ["mcp"]),
        *(
            (
                {
                    "tools": [TOOL],
                    "tool_choice": choice,
                    "text": {"format": {"type": "json_object"}},
                },
                "text",
                ["tools", "'none'"],
            )
            for choice in ("auto", "required", {"type": "function", "name": "roll"})
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", ["name"]),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "fly"}},
            "tool_choice",
            ["fly"],
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice",
            ["mode", "x"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}},
            "tool_choice",
            ["roll", "not in tools"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 3}},
            "tool_choice",
            ["list"],
        ),
        ({"text": {"format": {"type": "xml"}}}, "text", ["xml"]),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", ["schema"]),
        ({"reasoning": {"effort": "colossal"}}, "reasoning", ["colossal"]),
        ({"previous_response_id": "resp_x"}, "previous_response_id", ["resp_x"]),
    ],
)
async def test_a_bad_request_names_its_parameter(start, engine, fields, param, words):
    client = await start(engine, **PARSERS)
    for stream in (False, True):
        await refused(client, {**BODY, "stream": stream, **fields}, param, *words)
    assert not engine.requests


async def test_a_body_without_input(client):
    await refused(client, {}, "input", "input")


async def test_an_unknown_model(client):
    async with client.post(URL, json=BODY | {"model": "gpt-9"}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


def turns(number: int) -> list[dict[str, str]]:
    """A conversation of numbered turns, each of 10 tokens in the fake's tokenizer."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"turn {n:02}"} for n in range(number)]


@pytest.mark.parametrize(("number", "kept"), [(5, 5), (7, 5), (21, 5), (101, 5)])
async def test_truncation_drops_the_oldest_turns_and_no_more(client, engine, number, kept):
    # 64 tokens, 7 of them for the instructions, and at least one for the answer.
    given = turns(number)
    body = {"input": given, "instructions": "Kind", "truncation": "auto"}
    async with client.post(URL, json=body) as response:
        assert response.status == 200
    prompt = bytes(token for token in engine.requests[-1].token_ids if token).decode()
    assert prompt == "Kind" + "".join(turn["content"] for turn in given[number - kept :])
    if number > kept:
        await refused(client, {"input": given, "instructions": "Kind"}, "input", "64")


async def test_truncation_keeps_the_last_turn(client, engine):
    long = [*turns(4), {"role": "user", "content": "x" * 100}]
    await refused(client, {"input": long, "truncation": "auto"}, "input", "64", "103")
    await refused(client, {"input": "x" * 100, "truncation": "auto"}, "input", "64", "103")
    assert not engine.requests


FAILURES = [
    FakeDelta("", finish_reason="error", error="out of memory"),
    FakeDelta("", finish_reason="abort"),
    RuntimeError("a defect"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_a_failure_in_the_middle_fails_the_response(client, engine, failure):
    engine.script = lambda ids, params: [FakeDelta("a", num_output_tokens=1), failure]
    async with client.post(URL, json=BODY | {"stream": True}) as response:
        *events, last = await read_named_events(response)
    assert last["type"] == "response.failed"
    assert [event["sequence_number"] for event in [*events, last]] == list(range(len(events) + 1))
    failed = last["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert failed["error"]["message"]
    assert "a defect" not in failed["error"]["message"]
    assert engine.requests[0].stream.cancelled
    async with client.get(f"{URL}/{failed['id']}") as response:
        assert await response.json() == failed


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_at_the_beginning_is_an_http_error(client, engine, stream):
    engine.script = lambda ids, params: [FAILURES[0]]
    async with client.post(URL, json=BODY | {"stream": stream}) as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "out of memory"


async def test_a_failure_after_a_comment_is_an_error_event(start, engine):
    client = await start(engine, keep_alive_interval=0.05)
    engine.script = lambda ids, params: [0.2, FAILURES[0]]
    async with client.post(URL, json=BODY | {"stream": True}) as response:
        body = await response.text()
    assert body.startswith(": keep-alive\n\n")
    assert parse_named_events(body) == [
        {
            "type": "error",
            "sequence_number": 0,
            "code": "internal_error",
            "message": "out of memory",
            "param": None,
        }
    ]


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
