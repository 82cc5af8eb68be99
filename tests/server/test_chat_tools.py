"""What a chat's tools and forms become on their way to the template and the engine."""

from __future__ import annotations

import pytest

from miniinfer.parsing import tool_types
from miniinfer.sampling_params import ParameterError
from miniinfer.server import chat_parser

from .test_chat import chat, refused

URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}


async def submitted(client, engine, **fields):
    async with client.post(URL, json=chat(**fields)) as response:
        assert response.status == 200, await response.text()
    return engine.requests[-1]


async def test_the_template_sees_the_tools_as_they_were_sent(client, engine):
    await submitted(client, engine, tools=TOOLS)
    assert engine.tokenizer.chats[-1][1]["tools"] == TOOLS
    await submitted(client, engine, tools=TOOLS, tool_choice="none")
    assert engine.tokenizer.chats[-1][1]["tools"] is None


@pytest.mark.parametrize(
    ("setting", "choice", "expected"),
    [
        ("auto", "auto", "hermes"),
        ("auto", None, "hermes"),
        ("auto", "none", None),
        ("mistral", "auto", "mistral"),
        ("mistral", "required", "mistral"),
        ("none", "auto", None),
        ("none", "required", "hermes"),
        ("pythonic", NAMED, "pythonic"),
    ],
)
async def test_the_format_of_calls(start, engine, setting, choice, expected):
    client = await start(engine, tool_call_parser=setting, reasoning_parser="none")
    request = await submitted(client, engine, tools=TOOLS, tool_choice=choice)
    parser = request.options["parser"]
    assert (parser.tools if parser else None) == expected
    demanded = choice not in ("auto", "none", None)
    assert (request.params.structured_outputs is not None) == demanded
    assert len(engine.compiled) == demanded


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_without_tools_nothing_is_looked_for(client, engine, tools, choice):
    request = await submitted(client, engine, tools=tools, tool_choice=choice)
    assert request.options["parser"] is None


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools", "custom"),
        ({"tools": [tool(name="")]}, "tools", "name"),
        ({"tools": [tool(name="a b")]}, "tools", "a b"),
        ({"tools": [tool(name="x" * 129)]}, "tools", "128"),
        ({"tools": [tool(name=5)]}, "tools", "name"),
        ({"tools": [tool(), tool()]}, "tools", "unique"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools", "array"),
        ({"tools": [tool(parameters="x")]}, "tools", "parameters"),
        ({"tools": "f"}, "tools", "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "always"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice", "function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "now"}}},
            "tool_choice",
            "custom",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}},
            "tool_choice",
            "gone",
        ),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "now"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": "auto"}, "function_call", "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "tools"),
        (
            {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "tool_choice",
        ),
        *(
            ({"tools": TOOLS, "tool_choice": choice, **form}, next(iter(form)), "'none'")
            for choice in ("required", NAMED)
            for form in (
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"regex": "a"}},
            )
        ),
    ],
)
async def test_bad_tools(client, engine, fields, param, named):
    error = await refused(client, chat(**fields), param)
    assert named in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "strict": True},
                }
            },
            {"json": {}},
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {"regex": "[0-9]+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        (
            {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
            {"json_object": True},
        ),
    ],
)
async def test_forms_reach_the_engine(client, engine, fields, expected):
    request = await submitted(client, engine, **fields)
    form = request.params.structured_outputs
    assert {name: getattr(form, name) for name in expected} == expected
    assert engine.compiled == [form]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": "text"}, "response_format", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format",
            "schema",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regex"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            "structured_outputs",
            "exactly one",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
            "response_format",
        ),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ],
)
@pytest.mark.parametrize("url", [URL, "/v1/completions", "/generate"])
async def test_v77_bad_forms(client, engine, url, fields, param, named):
    body = chat(**fields) if url == URL else {"prompt": "a", **fields}
    async with client.post(url, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert error["param"] == param
    assert named in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
async def test_a_form_that_does_not_compile_names_its_parameter(client, engine, fields, param):
    engine.compile_error = ParameterError("structured_outputs", "the schema is wrong")
    error = await refused(client, chat(**fields), param)
    assert error["message"] == "the schema is wrong"
    engine.compile_error = ParameterError("structured_outputs", "structured_outputs.json: no")
    error = await refused(client, chat(**fields), param)
    assert error["message"].endswith(": no")
    assert error["message"].startswith(param)
    assert not engine.requests


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("low", {"reasoning_effort": "low"}), ("none", {"enable_thinking": False})],
)
async def test_reasoning_effort_reaches_the_template(client, engine, effort, expected):
    await submitted(client, engine, reasoning_effort=effort)
    options = engine.tokenizer.chats[-1][1]
    assert {name: options[name] for name in expected} == expected
    fields = {"reasoning_effort": effort, "chat_template_kwargs": {"enable_thinking": True}}
    await submitted(client, engine, **fields)
    assert engine.tokenizer.chats[-1][1]["enable_thinking"] is True


async def test_an_older_function_call_in_the_history(client, engine):
    call = {"name": "f", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
    ]
    async with client.post(URL, json={"messages": messages}) as response:
        assert response.status == 200
    seen = engine.tokenizer.chats[-1][0][1]
    assert seen["tool_calls"] == [{"type": "function", "function": call}]
    assert "function_call" not in seen


async def test_parts_of_every_kind_of_text(client, engine):
    engine.max_model_len = 1000
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    async with client.post(URL, json={"messages": [{"role": "user", "content": parts}]}) as r:
        assert r.status == 200
    assert engine.tokenizer.chats[-1][0][0]["content"] == parts


@pytest.mark.parametrize("skip", [None, True, False])
async def test_v18_special_tokens_are_the_parsers_to_find(client, engine, skip):
    """The server leaves the request's choice alone; the core shows the parser its tags anyway."""
    request = await submitted(client, engine, tools=TOOLS, skip_special_tokens=skip)
    assert request.params.skip_special_tokens == (skip is not False)
    assert request.options["parser"].tools == "hermes"


@pytest.mark.parametrize(
    ("parser", "opened", "tools", "after"),
    [
        ("qwen3", True, None, "</think>"),
        ("deepseek_r1", True, None, "</think>"),
        ("qwen3", False, None, None),
        ("none", True, None, None),
        ("gpt_oss", False, None, "<|channel|>final<|message|>"),
        ("gpt_oss", False, TOOLS, None),
        ("qwen3", True, TOOLS, "</think>"),
    ],
)
async def test_a_form_waits_for_the_end_of_reasoning(
    start, engine, monkeypatch, parser, opened, tools, after
):
    monkeypatch.setattr(chat_parser, "prompt_opens_reasoning", lambda *given: opened)
    client = await start(engine, reasoning_parser=parser)
    fields = {"tools": tools, "tool_choice": "required"}
    if tools is None:
        fields = {"response_format": {"type": "json_object"}}
    request = await submitted(client, engine, **fields)
    form = request.params.structured_outputs
    assert form.after_token_ids == (list(after.encode()) if after else None)


async def test_the_parser_knows_the_tools_types(client, engine):
    request = await submitted(client, engine, tools=TOOLS)
    assert request.options["parser"].tool_types == tool_types(TOOLS)
