"""/v1/messages: answers of every kind, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from miniinfer.server.messages_arguments import tool_input

from .fake import CHAT_FRAME, FakeDelta, answer
from .named_events import read_named_events
from .said import PARSERS, SAID, SILENCE

URL = "/v1/messages"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("roll", "stop")]
BODY: dict[str, Any] = {
    "model": "fake-model",
    "max_tokens": 30,
    "messages": [{"role": "user", "content": "hey"}],
    "tools": TOOLS,
}
BLOCK_TYPES = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}
EMPTY = {"text": "", "thinking": "", "signature": "", "input": {}}
KEYS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


async def whole(client, **fields: Any) -> dict[str, Any]:
    async with client.post(URL, json=BODY | fields) as response:
        body = await response.json()
        assert response.status == 200, body
    Message.model_validate(body)
    return body


async def streamed(client, **fields: Any) -> list[dict[str, Any]]:
    async with client.post(URL, json=BODY | {"stream": True} | fields) as response:
        return await read_named_events(response)


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assert what every stream promises and return the message that it adds up to."""
    for event in events:
        EVENT.validate_python(event)
    start, *between, change, stop = events
    assert start["type"] == "message_start"
    assert change["type"] == "message_delta"
    assert stop == {"type": "message_stop"}
    message = start["message"]
    assert message["content"] == []
    assert message["stop_reason"] is message["stop_sequence"] is None
    assert change["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    assert change["usage"]["output_tokens"] >= message["usage"]["output_tokens"]
    content = check_blocks(between)
    return message | change["delta"] | {"content": content, "usage": change["usage"]}


def check_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assert that the events are whole blocks, one after another, and return these."""
    blocks: list[dict[str, Any]] = []
    json_text = ""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            block = event["content_block"]
            assert block == block | {k: v for k, v in EMPTY.items() if k in block}
            blocks.append(dict(block))
            is_open, json_text = True, ""
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = tool_input(json_text)
            continue
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        key = KEYS[delta["type"]]
        assert delta[key]
        if key == "partial_json":
            json_text += delta[key]
        else:
            blocks[-1][key] += delta[key]
    assert not is_open
    return blocks


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what differs from one to the next."""
    content = [block | ({"id": ""} if "id" in block else {}) for block in message["content"]]
    return message | {"id": "", "content": content}


@pytest.mark.parametrize("name", SAID)
async def test_a_stream_adds_up_to_the_whole_answer(start, engine, name):
    client = await start(engine, **PARSERS)
    engine.script = SAID[name]
    message = check_events(await streamed(client))
    assert anonymous(message) == anonymous(await whole(client))
    assert [block["type"] for block in message["content"]] == [
        BLOCK_TYPES[kind] for kind in SAID[name].kinds
    ]
    expected = "tool_use" if "tool_call" in SAID[name].kinds else "end_turn"
    if name.startswith("cut"):
        expected = "max_tokens"
    elif name == "stop string":
        expected = "stop_sequence"
    assert message["stop_reason"] == expected
    assert message["stop_sequence"] == ("END" if name == "stop string" else None)


async def test_the_blocks_of_an_answer(start, engine):
    client = await start(engine, **PARSERS)
    engine.script = SAID["everything"]
    message = await whole(client)
    thinking, text, tool_use = message["content"]
    assert thinking["thinking"] == "hm"
    assert thinking["signature"]
    assert text["text"] == "Look: "
    assert (tool_use["name"], tool_use["input"]) == ("roll", {"sides": 6})
    assert tool_use["id"].startswith("toolu_")
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["model"] == "fake-model"
    assert message["usage"] == {
        "input_tokens": 3 + CHAT_FRAME - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len("hm" + "Look: " + "roll" + '{"sides": 6}'),
        "output_tokens_details": {"thinking_tokens": 2},
    }


async def test_silence_is_a_message_without_blocks(client, engine):
    engine.script = SILENCE
    message = check_events(await streamed(client, tools=[]))
    assert message["content"] == []
    assert message["stop_reason"] == "end_turn"
    assert anonymous(message) == anonymous(await whole(client, tools=[]))


async def test_an_answer_that_is_not_parsed_is_text(client, engine):
    engine.script = lambda ids, params: [
        FakeDelta("<think>hm", parts=[("reasoning", "hm")], finish_reason="stop")
    ]
    [block] = (await whole(client, tools=[]))["content"]
    assert block["text"] == "<think>hm"


@pytest.mark.parametrize(
    ("max_tokens", "limit", "reason"),
    [
        (30, 30, "max_tokens"),
        (64 - 6, 64 - 6, "max_tokens"),
        (64 - 5, 64 - 6, "model_context_window_exceeded"),
        (32_000, 64 - 6, "model_context_window_exceeded"),
    ],
)
async def test_the_context_limits_an_answer_too(client, engine, max_tokens, limit, reason):
    engine.script = lambda ids, params: answer(params, ["a"], finish_reason="length")
    message = await whole(client, max_tokens=max_tokens, tools=[])
    assert message["stop_reason"] == reason
    assert engine.requests[0].params.max_tokens == limit


async def test_silence_is_filled_with_pings(start, engine):
    client = await start(engine, keep_alive_interval=0.05)
    engine.script = lambda ids, params: [0.2, *answer(params, ["a", "b"])]
    async with client.post(URL, json=BODY | {"stream": True}) as response:
        body = await response.text()
    assert body.startswith('event: ping\ndata: {"type":"ping"}\n\n')
    assert "keep-alive" not in body


@pytest.mark.parametrize("name", ["text", "everything", "calls", "stop string"])
async def test_anthropics_client(start, engine, name):
    client = await start(engine, **PARSERS)
    engine.script = SAID[name]
    asked: dict[str, Any] = {**BODY, "stop_sequences": ["END"]}
    async with anthropic.AsyncAnthropic(
        base_url=str(client.make_url("/")), api_key="none", max_retries=0
    ) as official:
        message = await official.messages.create(**asked)
        raw = [event async for event in await official.messages.create(**asked, stream=True)]
        async with official.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert raw[-1].type == "message_stop"
    plain, accumulated = (anonymous(json.loads(each.to_json())) for each in (message, final))
    # What the client's own accumulation adds.
    accumulated.pop("stop_details")
    for block in accumulated["content"]:
        block.pop("parsed_output", None)
    assert plain == accumulated
    assert message._request_id
    said = "".join(block.text for block in message.content if block.type == "text")
    assert "".join(texts) == said


async def test_anthropics_client_goes_on_after_tools_and_thoughts(start, engine):
    client = await start(engine, **PARSERS)
    engine.max_model_len = 1000
    engine.script = SAID["everything"]
    async with anthropic.AsyncAnthropic(
        base_url=str(client.make_url("/")), api_key="none", max_retries=0
    ) as official:
        message = await official.messages.create(**BODY)
        tool_use = message.content[2]
        result = {"type": "tool_result", "tool_use_id": tool_use.id, "content": "6"}
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        engine.script = SAID["text"]
        await official.messages.create(**BODY | {"messages": messages})
    function = {"name": "roll", "arguments": {"sides": 6}}
    assert engine.tokenizer.chats[-1][0] == [
        {"role": "user", "content": "hey"},
        {
            "role": "assistant",
            "content": "Look: ",
            "reasoning_content": "hm",
            "tool_calls": [{"id": tool_use.id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "6", "tool_call_id": tool_use.id},
    ]


async def test_anthropics_client_counts_tokens(client, engine):
    async with anthropic.AsyncAnthropic(
        base_url=str(client.make_url("/")), api_key="none", max_retries=0
    ) as official:
        asked = {key: BODY[key] for key in ("model", "messages", "tools")}
        count = await official.messages.count_tokens(**asked, system="Be kind.")
        assert count.input_tokens == len("Be kind.hey") + 2 * CHAT_FRAME
        long = [{"role": "user", "content": "x" * 1000}]
        count = await official.messages.count_tokens(model="fake-model", messages=long)
        assert count.input_tokens == 1000 + CHAT_FRAME
    assert not engine.requests
