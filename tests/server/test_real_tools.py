"""Tool calls and forms of answers over a real engine, whose tiny model knows nothing of either."""

from __future__ import annotations

import json
import re

import aiohttp
import jsonschema
import pytest
from tokenizers import Tokenizer

import tiny
from miniinfer.parsing import TOOL_PARSERS

from .real import real_server, until_idle
from .sse_client import parse_events, streamed_messages

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"sides": {"enum": [6, 20]}, "fair": {"type": "boolean"}},
    "required": ["sides"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "roll", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "roll"}}


class Chatter:
    """Asks a server for whole and streamed answers to the same greedy chat."""

    def __init__(self, session, url):
        self._session = session
        self._url = url + CHAT

    async def ask(self, status=200, **fields):
        body = {"messages": [{"role": "user", "content": "roll"}], "temperature": 0, **fields}
        async with self._session.post(self._url, json=body) as response:
            answer = await response.json()
            assert response.status == status, answer
        return answer

    async def both(self, **fields):
        """Return the only choice, having compared it with the streamed one."""
        fields.setdefault("max_tokens", 240)
        [choice] = (await self.ask(**fields))["choices"]
        message = choice["message"]
        body = {"messages": [{"role": "user", "content": "roll"}], "temperature": 0, **fields}
        async with self._session.post(self._url, json={**body, "stream": True}) as response:
            *events, _ = parse_events(await response.text())
        streamed = streamed_messages([json.loads(event) for event in events])[0]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["finish_reason"] == choice["finish_reason"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [call["function"] for call in streamed["tool_calls"]] == calls
        return message["content"], calls, choice["finish_reason"]


async def chatter(model, **settings):
    async with (
        real_server(model, {"max_model_len": 256}, **settings) as (url, llm),
        aiohttp.ClientSession() as session,
    ):
        yield Chatter(session, url)
        await until_idle(llm)


@pytest.fixture
async def served(tiny_model):
    async for each in chatter(tiny_model):
        yield each


@pytest.fixture(params=TOOL_PARSERS)
async def served_with(request, tiny_model):
    async for each in chatter(tiny_model, tool_call_parser=request.param):
        yield each


def check_arguments(call):
    arguments = json.loads(call["arguments"])
    if call["name"] == "roll":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (call["name"], arguments) == ("now", {})


async def test_a_demanded_call_in_every_format(served_with):
    content, calls, reason = await served_with.both(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert content is None
    [call] = calls
    check_arguments(call)
    assert reason == "tool_calls"


async def test_v23_a_named_function_in_every_format(served_with):
    content, calls, reason = await served_with.both(tools=TOOLS, tool_choice=NAMED)
    assert content is None
    [call] = calls
    assert call["name"] == "roll"
    check_arguments(call)
    assert reason == "stop"


async def test_several_calls_are_each_whole_or_cut(served):
    for seed in range(4):
        _, calls, reason = await served.both(
            tools=TOOLS, tool_choice="required", temperature=1, seed=seed, max_tokens=200
        )
        assert calls
        for call in calls if reason == "tool_calls" else calls[:-1]:
            check_arguments(call)


async def test_a_call_that_is_cut(served):
    _, calls, reason = await served.both(tools=TOOLS, tool_choice=NAMED, max_tokens=45)
    assert reason == "length"
    assert [call["name"] for call in calls] == ["roll"]


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_demanded_call_that_is_cut_is_no_content(served_with, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    lengths = []
    for max_tokens in (1, 5, 12, 20, 26, 30, 37, 45, 60, 75):
        content, calls, reason = await served_with.both(**fields, max_tokens=max_tokens)
        if reason != "length":
            break
        assert content in ("", None)
        assert len(calls) <= 1
        lengths.append(sum(len(call["arguments"]) for call in calls))
    assert lengths == sorted(lengths)
    assert lengths[0] == 0


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_a_model_that_is_free_to_call_may_talk(served, choice):
    content, calls, _ = await served.both(tools=TOOLS, tool_choice=choice, max_tokens=20)
    assert content
    assert not calls


async def test_a_schema(served):
    form = {"type": "json_schema", "json_schema": {"name": "roll", "schema": SCHEMA}}
    content, _, reason = await served.both(response_format=form)
    assert reason == "stop"
    jsonschema.validate(json.loads(content), SCHEMA)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" | "b" start'}, "b*a"),
    ],
)
async def test_other_forms(served, form, pattern):
    content, _, reason = await served.both(structured_outputs=form)
    if reason == "stop":
        assert re.fullmatch(pattern, content)
    else:
        assert content == "b" * 240


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "objct"}},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs"),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 5}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
    ],
)
async def test_v75_v77_what_cannot_be_obeyed_is_refused(served, fields, param):
    error = (await served.ask(400, **fields))["error"]
    assert error["param"] == param


def large(keyword):
    return {"type": "integer", keyword: 10**20}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        *(
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
                "response_format",
                [f"{keyword} must", "got 1e+20"],
            )
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")
            for schema in (large(keyword), {"properties": {"a": {"items": large(keyword)}}})
        ),
        (
            {"structured_outputs": {"json": json.dumps({"enum": [2**64 + 1]})}},
            "structured_outputs",
            ["enum must", "1.8446744073709552e+19"],
        ),
        (
            {
                "tools": [
                    {
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": large("minimum")}},
                        }
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            ["tools: ", "minimum must", "1e+20"],
        ),
        (
            {
                "tools": [{"function": {"name": f"tool_{at}"}} for at in range(2000)],
                "tool_choice": "required",
            },
            "tools",
            ["tools: ", "at most 262144 bytes, got "],
        ),
    ],
)
async def test_a_refusal_names_its_parameter_the_limit_and_the_value(served, fields, param, words):
    error = (await served.ask(400, **fields))["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    for word in words:
        assert word in error["message"]
    # The engine is as it was.
    await served.ask(max_tokens=1)


async def test_allowed_ids_and_bad_words(served):
    letters = [ord(letter) - ord("!") for letter in "ab"]
    fields = {"allowed_token_ids": letters, "max_tokens": 12}
    content, _, _ = await served.both(**fields)
    assert set(content) <= set("ab")
    word = content[:2]
    without, _, _ = await served.both(**fields, bad_words=[word])
    assert word not in without


@pytest.fixture
async def thinking(tiny_model):
    async for each in chatter(tiny_model, reasoning_parser="deepseek_r1"):
        yield each


async def test_v9_reasoning_that_the_model_does_not_close(thinking):
    fields = {"logit_bias": {"256": 100}, "min_tokens": 5, "skip_special_tokens": False}
    [choice] = (await thinking.ask(**fields))["choices"]
    message = choice["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert "<eos>" not in message["reasoning_content"]
    assert choice["finish_reason"] == "stop"
    content, _, reason = await thinking.both(**fields)
    assert (content, reason) == ("", "stop")


async def test_a_form_begins_at_once_where_the_reasoning_is_over(thinking):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    messages = [
        {"role": "user", "content": "roll"},
        {"role": "assistant", "content": "<think>so</think>"},
    ]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 60}
    [choice] = (await thinking.ask(response_format=form, **fields))["choices"]
    assert "reasoning_content" not in choice["message"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    # Before that it waits.
    [choice] = (await thinking.ask(response_format=form, max_tokens=20))["choices"]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


@pytest.fixture
async def tagged(tmp_path):
    """A model whose vocabulary has the tags of calls as special tokens, 260 and 261."""
    folder = tiny.write_tiny_llama(tmp_path / "tagged", vocab_size=tiny.VOCAB + 2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"]) == 2
    assert tokenizer.token_to_id("<tool_call>") == tiny.VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    async for each in chatter(folder):
        yield each


async def test_v18_tags_that_are_special_tokens(tagged):
    content, [call], reason = await tagged.both(tools=TOOLS, tool_choice=NAMED)
    assert content is None
    check_arguments(call)
    assert reason == "stop"
    fields = {"tools": TOOLS, "tool_choice": "required", "return_token_ids": True}
    [choice] = (await tagged.ask(max_tokens=240, **fields))["choices"]
    assert choice["token_ids"][0] == tiny.VOCAB
    # Without tools they are special tokens like any other.
    tags = {"logit_bias": {str(tiny.VOCAB): 100}, "max_tokens": 3}
    assert await tagged.both(**tags) == ("", [], "length")
    content, _, _ = await tagged.both(**tags, skip_special_tokens=False)
    assert content == "<tool_call>" * 3
