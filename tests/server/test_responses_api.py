"""/v1/responses: answers of every kind, whole and as events."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from .fake import CHAT_FRAME, FakeDelta
from .named_events import read_named_events
from .said import PARSERS, SAID, SILENCE, Said

URL = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}}
    for name in ("roll", "stop")
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ITEM_TYPES = {"content": "message", "reasoning": "reasoning", "tool_call": "function_call"}


def asking(**fields: Any) -> dict[str, Any]:
    return {"input": "hey", "tools": TOOLS, **fields}


async def whole(client, **fields: Any) -> dict[str, Any]:
    async with client.post(URL, json=asking(**fields)) as response:
        body = await response.json()
        assert response.status == 200, body
    Response.model_validate(body)
    return body


async def streamed(client, **fields: Any) -> list[dict[str, Any]]:
    async with client.post(URL, json=asking(stream=True, **fields)) as response:
        return await read_named_events(response)


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assert what every stream promises and return its last response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    created, in_progress, *between, last = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert last["type"] == f"response.{last['response']['status']}"
    items = check_items(between)
    assert last["response"]["output"] == items
    assert last["response"] | FIRST == created["response"] | FIRST
    return last["response"]


FIRST = dict.fromkeys(("status", "output", "usage", "completed_at", "incomplete_details", "error"))
"""The fields that change in the course of a response."""


def check_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assert that the events are whole items, one after another, and return these."""
    items: list[dict[str, Any]] = []
    while events:
        added = events.pop(0)
        assert added["type"] == "response.output_item.added"
        assert added["output_index"] == len(items)
        end = next(i for i, e in enumerate(events) if e["type"] == "response.output_item.done")
        inside, done, events = events[:end], events[end], events[end + 1 :]
        item = done["item"]
        assert done["output_index"] == len(items)
        assert added["item"]["status"] == "in_progress"
        blank = {"content": [], "arguments": "", "status": "in_progress"}
        assert added["item"] == item | {k: v for k, v in blank.items() if k in item}
        assert {(e["item_id"], e["output_index"]) for e in inside} == {(item["id"], len(items))}
        check_inside(inside, item)
        items.append(item)
    return items


def check_inside(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Assert that the events of an item add up to it."""
    name = {
        "message": "response.output_text",
        "reasoning": "response.reasoning_text",
        "function_call": "response.function_call_arguments",
    }[item["type"]]
    if item["type"] == "function_call":
        *deltas, done = events
        text, key = item["arguments"], "arguments"
        assert done["name"] == item["name"]
    else:
        added, *deltas, done, part_done = events
        assert added["type"] == "response.content_part.added"
        assert added["part"]["text"] == ""
        assert part_done["type"] == "response.content_part.done"
        assert item["content"] == [part_done["part"]]
        assert all(event["content_index"] == 0 for event in events)
        text, key = item["content"][0]["text"], "text"
    assert {delta["type"] for delta in deltas} <= {f"{name}.delta"}
    assert done["type"] == f"{name}.done"
    assert "".join(delta["delta"] for delta in deltas) == done[key] == text
    assert all(delta["delta"] for delta in deltas)
    if item["type"] == "message":
        logprobs = [entry for delta in deltas for entry in delta["logprobs"]]
        assert logprobs == done["logprobs"] == item["content"][0]["logprobs"]


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from one to the next."""
    marks = {"id": "", "created_at": 0, "completed_at": 0}
    output = [
        item | {key: "" for key in ("id", "call_id") if key in item} for item in response["output"]
    ]
    return response | marks | {"output": output}


@pytest.mark.parametrize("fields", [{}, LOGPROBS], ids=["plain", "logprobs"])
@pytest.mark.parametrize("name", SAID)
async def test_a_stream_adds_up_to_the_whole_answer(start, engine, name, fields):
    client = await start(engine, **PARSERS)
    engine.script = SAID[name]
    response = check_events(await streamed(client, **fields))
    assert anonymous(response) == anonymous(await whole(client, **fields))
    output = response["output"]
    assert [item["type"] for item in output] == [ITEM_TYPES[kind] for kind in SAID[name].kinds]
    cut = SAID[name].fields["finish_reason"] == "length"
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    statuses = ["completed"] * len(output)
    if cut:
        statuses[-1] = "incomplete"
    assert [item["status"] for item in output] == statuses


async def test_the_items_of_an_answer(start, engine):
    client = await start(engine, **PARSERS)
    engine.script = SAID["everything"]
    response = await whole(client)
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []
    assert message["role"] == "assistant"
    assert message["content"] == [
        {"type": "output_text", "text": "Look: ", "annotations": [], "logprobs": []}
    ]
    assert (call["name"], call["arguments"]) == ("roll", '{"sides": 6}')
    assert call["call_id"].startswith("call_")
    assert len({item["id"] for item in response["output"]}) == 3
    tokens = len("hm" + "Look: " + "roll" + '{"sides": 6}')
    assert response["usage"] == {
        "input_tokens": 3 + CHAT_FRAME,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 3 + CHAT_FRAME + tokens,
    }


async def test_an_answer_that_is_not_parsed_is_one_message(client, engine):
    engine.script = lambda ids, params: [
        FakeDelta("<think>"),
        FakeDelta("hm", parts=[("reasoning", "hm")], finish_reason="stop"),
    ]
    [message] = (await whole(client, tools=[]))["output"]
    assert message["content"][0]["text"] == "<think>hm"


async def test_silence_is_an_empty_message(client, engine):
    engine.script = SILENCE
    response = check_events(await streamed(client, tools=[]))
    [message] = response["output"]
    assert message["content"][0]["text"] == ""
    assert anonymous(response) == anonymous(await whole(client, tools=[]))


async def test_logprobs_are_those_of_the_text_alone(start, engine):
    client = await start(engine, **PARSERS)
    engine.script = Said(
        (("reasoning", "say hi"), ("content", "hi"), *SAID["call"].parts),
        ("reasoning", "content", "tool_call"),
    )
    message = (await whole(client, **LOGPROBS))["output"][1]
    [part] = message["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["h", "i"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


async def test_the_response_repeats_what_was_asked(start, engine):
    client = await start(engine, **PARSERS)
    asked = {
        "instructions": "Be kind.",
        "max_output_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.75,
        "metadata": {"topic": "dice"},
        "user": "u1",
        "safety_identifier": "s1",
        "truncation": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "tool_choice": "none",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": None},
    }
    response = await whole(client, model="fake-model", **asked)
    assert {name: response[name] for name in asked} == asked
    assert response["tools"] == TOOLS
    assert response["model"] == "fake-model"
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    assert response["background"] is False
    [request] = engine.requests
    assert request.params.max_tokens == 20
    assert request.params.temperature == 0.5
    assert request.params.top_p == 0.75
    assert request.options["request_id"] == response["id"]


async def test_the_effective_sampling_is_shown(client, engine):
    engine.default_sampling_params = {"temperature": 0.25, "top_p": 0.5}
    response = await whole(client, tools=[])
    assert (response["temperature"], response["top_p"]) == (0.25, 0.5)


@pytest.mark.parametrize("name", ["text", "everything", "calls"])
async def test_openais_client(start, engine, name):
    client = await start(engine, **PARSERS)
    engine.script = SAID[name]
    async with openai.AsyncOpenAI(
        base_url=str(client.make_url("/v1")), api_key="none", max_retries=0
    ) as official:
        answer = await official.responses.create(
            model="fake-model", input="hey", tools=TOOLS, reasoning={"effort": "low"}
        )
        stream = await official.responses.create(
            model="fake-model", input="hey", tools=TOOLS, stream=True
        )
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == answer.output_text
        async with official.responses.stream(
            model="fake-model", input="hey", tools=TOOLS
        ) as helper:
            async for _ in helper:
                pass
            final = await helper.get_final_response()
    assert final.output_text == answer.output_text
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    said = "".join(str(part[1]) for part in SAID[name].parts if part[0] == "content")
    assert answer.output_text.split() == said.split()
