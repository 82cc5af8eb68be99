"""Reasoning, content and tool calls of a chat: whole answers and streams say the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from .fake import FakeDelta, FakeLogprob, spoken
from .sse_client import read_events, streamed_messages

URL = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("roll", "put")
]
CALL = [("tool_call", 0, "roll")]
ARGUMENTS = [("arguments", 0, '{"sides"'), ("arguments", 0, ": 6}")]


def body_of(**fields):
    return {"messages": [{"role": "user", "content": "hey"}], "tools": TOOLS, **fields}


async def both(client, **fields):
    """Return the whole choices and the streamed ones, ids of calls left out of both."""
    async with client.post(URL, json=body_of(**fields)) as response:
        answer = await response.json()
        assert response.status == 200, answer
    whole = {}
    for choice in answer["choices"]:
        message = choice["message"]
        assert message.pop("role") == "assistant"
        assert message.pop("refusal") is None
        whole[choice["index"]] = {**message, "finish_reason": choice["finish_reason"]}
    async with client.post(URL, json=body_of(stream=True, **fields)) as response:
        streamed = streamed_messages(await read_events(response))
    ids = set()
    for choice in (*whole.values(), *streamed.values()):
        for call in choice.setdefault("tool_calls", []):
            ids.add(call["id"])
            assert call.pop("id").startswith("call_")
            assert call.pop("type") == "function"
            assert isinstance(call["function"]["arguments"], str)
    assert len(ids) == sum(len(c["tool_calls"]) for c in (*whole.values(), *streamed.values()))
    for choice in streamed.values():
        if choice["tool_calls"] and not choice["content"]:
            choice["content"] = None
    assert whole == streamed
    return whole


CASES = [
    ([[("content", "Hi")], [("content", " there")]], "Hi there", None, [], "stop"),
    (
        [[("reasoning", "so")], [("reasoning", " it is"), ("content", "42")]],
        "42",
        "so it is",
        [],
        "stop",
    ),
    ([CALL, ARGUMENTS], None, None, [("roll", '{"sides": 6}')], "tool_calls"),
    (
        [
            [("reasoning", "r"), ("content", "One sec.\n"), *CALL, *ARGUMENTS],
            [("content", "then"), ("tool_call", 1, "roll")],
            [],
            [("arguments", 1, "{}"), ("content", "ok?")],
        ],
        "One sec.\nthenok?",
        "r",
        [("roll", '{"sides": 6}'), ("roll", "{}")],
        "tool_calls",
    ),
    ([CALL, []], None, None, [("roll", "")], "tool_calls"),
    ([[]], "", None, [], "stop"),
]


@pytest.mark.parametrize(("deltas", "content", "reasoning", "calls", "reason"), CASES)
@pytest.mark.parametrize("n", [1, 2])
async def test_streamed_is_whole(client, engine, deltas, content, reasoning, calls, reason, n):
    engine.script = lambda ids, params: spoken(params, deltas)
    choices = await both(client, n=n)
    assert set(choices) == set(range(n))
    for choice in choices.values():
        assert choice["content"] == content
        assert choice.get("reasoning_content") == reasoning
        functions = [call["function"] for call in choice["tool_calls"]]
        assert functions == [{"name": name, "arguments": text} for name, text in calls]
        assert choice["finish_reason"] == reason


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize(
    ("deltas", "finish", "expected"),
    [
        ([CALL, ARGUMENTS], "stop", {"auto": "tool_calls", "required": "tool_calls"}),
        ([CALL, ARGUMENTS], "length", dict.fromkeys(("auto", "required", "named"), "length")),
        ([[("content", "Hello")]], "stop", {}),
    ],
)
async def test_v22_v23_finish_reasons(client, engine, choice, deltas, finish, expected):
    engine.script = lambda ids, params: spoken(params, deltas, finish_reason=finish)
    named = {"type": "function", "function": {"name": "roll"}}
    choices = await both(client, tool_choice=named if choice == "named" else choice)
    assert choices[0]["finish_reason"] == expected.get(choice, "stop")


async def test_a_call_that_a_stop_string_may_have_cut_is_no_reason_to_call(client, engine):
    def script(ids, params):
        *deltas, last = spoken(params, [CALL, [("arguments", 0, "{")]], finish_reason="stop")
        return [*deltas, replace(last, stop_reason="sides")]

    engine.script = script
    choices = await both(client, tool_choice="required", stop="sides")
    assert choices[0]["finish_reason"] == "stop"
    assert choices[0]["tool_calls"][0]["function"]["arguments"] == "{"


async def test_v15_only_the_first_delta_of_a_call_names_it(client, engine):
    engine.script = lambda ids, params: spoken(params, [CALL, *([a] for a in ARGUMENTS)])
    async with client.post(URL, json=body_of(stream=True)) as response:
        events = await read_events(response)
    deltas = [event["choices"][0]["delta"] for event in events]
    first, *rest = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first["function"] == {"name": "roll", "arguments": ""}
    assert first["type"] == "function"
    assert rest == [{"index": 0, "function": {"arguments": a[2]}} for a in ARGUMENTS]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}


async def test_v73_arguments_are_text_in_whole_answers(client, engine):
    engine.script = lambda ids, params: spoken(params, [CALL, ARGUMENTS])
    [choice] = (await both(client)).values()
    assert json.loads(choice["tool_calls"][0]["function"]["arguments"]) == {"sides": 6}


async def test_one_call_only_without_parallel_calls(client, engine):
    second = [("tool_call", 1, "put"), ("arguments", 1, "{}")]
    engine.script = lambda ids, params: spoken(params, [CALL, ARGUMENTS, second])
    [choice] = (await both(client, parallel_tool_calls=False)).values()
    assert [call["function"]["name"] for call in choice["tool_calls"]] == ["roll"]
    [choice] = (await both(client, parallel_tool_calls=True)).values()
    assert [call["function"]["name"] for call in choice["tool_calls"]] == ["roll", "put"]


async def test_reasoning_is_left_out_when_it_is_not_wanted(client, engine):
    engine.script = lambda ids, params: spoken(
        params, [[("reasoning", "so")], [("reasoning", "!"), ("content", "42")]]
    )
    [choice] = (await both(client, include_reasoning=False)).values()
    assert choice["content"] == "42"
    assert "reasoning_content" not in choice


async def test_logprobs_with_a_parser_come_once_and_in_order(client, engine):
    engine.script = lambda ids, params: spoken(
        params, [[], [("content", "a"), *CALL], [*ARGUMENTS], []]
    )
    fields = {"logprobs": True, "return_token_ids": True}
    async with client.post(URL, json=body_of(**fields)) as response:
        [whole] = (await response.json())["choices"]
    async with client.post(URL, json=body_of(stream=True, **fields)) as response:
        chunks = [event["choices"][0] for event in await read_events(response)]
    entries = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert len(entries) == 4
    assert [i for c in chunks for i in c.get("token_ids", ())] == whole["token_ids"] == [33] * 4
    await both(client, **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_and_ids(client, engine, stream):
    score = FakeLogprob(7, "x", b"x", -1.5, 3, [(9, "y", b"y", -0.5)])
    engine.script = lambda ids, params: (
        [FakeDelta("a", index=index, prompt_logprobs=[None, score]) for index in range(params.n)]
        + [
            FakeDelta("", index=index, finish_reason="stop", num_output_tokens=1)
            for index in range(params.n)
        ]
    )
    body = body_of(stream=stream, n=2, prompt_logprobs=1, return_token_ids=True, tools=None)
    async with client.post(URL, json=body) as response:
        answers = await read_events(response) if stream else [await response.json()]
    expected = {
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
        "7": {"logprob": -1.5, "rank": 3, "decoded_token": "x"},
    }
    found = [answer["prompt_logprobs"] for answer in answers if "prompt_logprobs" in answer]
    assert found == [[None, expected]]
    ids = [answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer]
    assert ids == [engine.requests[0].token_ids]
    assert engine.requests[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_what_is_continued(client, engine, stream):
    messages = [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "stream": stream}
    async with client.post(URL, json=body) as response:
        if stream:
            text = streamed_messages(await read_events(response))[0]["content"]
        else:
            text = (await response.json())["choices"][0]["message"]["content"]
    assert text == "Well, Hello"


async def test_v26_a_closed_reasoning_is_content(start, engine):
    client = await start(engine, reasoning_parser="qwen3")
    engine.script = lambda ids, params: spoken(params, [[("content", "1")], [("content", "2")]])
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "tools": None}
    [choice] = (await both(client, **fields)).values()
    assert choice["content"] == "12"
    assert "reasoning_content" not in choice
    for request in engine.requests:
        parser = request.options["parser"]
        assert (parser.reasoning, parser.tools, parser.in_reasoning) == ("qwen3", None, False)
    assert engine.tokenizer.chats[0][1]["enable_thinking"] is False


async def test_v69_every_chunk_has_what_strict_clients_need(client, engine):
    engine.script = lambda ids, params: spoken(params, [[("reasoning", "r")], CALL, ARGUMENTS])
    async with client.post(URL, json=body_of(stream=True, service_tier="auto")) as response:
        events = await read_events(response)
    for event in events:
        assert event["service_tier"] == "default"
        for choice in event["choices"]:
            assert {"index", "delta", "finish_reason"} <= set(choice)
            assert all("index" in call for call in choice["delta"].get("tool_calls", ()))
    for key in ("id", "created", "model", "object"):
        assert len({event[key] for event in events}) == 1
