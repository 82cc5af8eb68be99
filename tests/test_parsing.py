"""Parsers by name, whole texts, and requests whose answers are parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines import SIZES, greedy
from miniinfer import AsyncLLM, EngineArgs, _core
from miniinfer.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserSpec,
    Part,
    parse,
    tool_types,
)

CASES = json.loads((Path(__file__).parent / "data" / "parser_cases.json").read_text("utf-8"))


def spec_of(case: dict[str, Any]) -> ParserSpec:
    return ParserSpec(
        reasoning=case.get("reasoning_parser"),
        tools=case.get("tool_parser"),
        in_reasoning=case.get("in_reasoning"),
        tool_types=case.get("tool_types", {}),
    )


def message(parts: list[Part]) -> dict[str, Any]:
    """The answer that a reader of the parts has at the end."""
    whole: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for part in parts:
        if part[0] == "tool_call":
            assert part[1] == len(whole["calls"])
            whole["calls"].append({"name": part[2], "arguments": ""})
        elif part[0] == "arguments":
            whole["calls"][part[1]]["arguments"] += part[2]
        else:
            whole[part[0]] += part[1]
    return whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_whole_texts(case: dict[str, Any]) -> None:
    expected = {name: case[name] for name in ("reasoning", "content", "calls")}
    assert message(parse(case["text"], spec_of(case))) == expected


def test_every_name_is_known_to_the_core_and_no_other() -> None:
    for name in REASONING_PARSERS:
        assert parse("", ParserSpec(reasoning=name)) == []
    for name in TOOL_PARSERS:
        assert parse("", ParserSpec(tools=name)) == []
    with pytest.raises(_core.RequestError, match=f"tool_parser .*{', '.join(TOOL_PARSERS)}") as no:
        parse("", ParserSpec(tools="Hermes"))
    assert no.value.param == "tool_parser"
    with pytest.raises(_core.RequestError, match=", ".join(REASONING_PARSERS)) as no:
        parse("", ParserSpec(reasoning=""))
    assert no.value.param == "reasoning_parser"
    spec = ParserSpec(tools="qwen3_coder", tool_types={"f": {"a": "text"}})
    with pytest.raises(_core.RequestError, match=r'tool_types must be one of .*got "text"'):
        parse("", spec)


def test_types_are_read_from_tools() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "d": {"enum": ["x", "y"]},
        "e": {"const": True},
        "f": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "g": {"type": ["string", "integer"]},
        "h": {},
        "i": {"type": "null"},
        "j": {"type": "date"},
        "k": {"enum": [1, None]},
        "l": "malformed",
        "m": {"anyOf": [{"$ref": "#/x"}, {"type": "string"}]},
    }
    types = tool_types(
        [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": properties}},
            },
            {"name": "bare", "parameters": {"properties": {"x": {"type": "array"}}}},
            {"function": {"name": "none", "parameters": None}},
            {"function": {"description": "no name"}},
        ]
    )
    names = "string integer object string boolean number any any null any integer any any"
    assert types == {
        "f": dict(zip(properties, names.split(), strict=True)),
        "bare": {"x": "array"},
        "none": {},
    }
    assert tool_types(None) == {}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"anyOf": [deep]}
    tools = [{"name": "f", "parameters": {"properties": {"a": deep}}}]
    assert tool_types(tools) == {"f": {"a": "any"}}


async def test_a_request_is_parsed_as_its_text_is(tiny_model: Path) -> None:
    async with AsyncLLM(EngineArgs(model=str(tiny_model), **SIZES)) as llm:
        prompt = llm.tokenizer.encode("Hello")

        async def run(parser: ParserSpec | None) -> tuple[str, list[Part]]:
            stream = llm.submit(prompt, greedy(16), parser=parser)
            deltas = [delta async for delta in stream]
            parts = [part for delta in deltas for part in delta.parts]
            return "".join(delta.text for delta in deltas), parts

        text, nothing = await run(None)
        assert text
        assert nothing == []
        for spec in (ParserSpec(tools="hermes"), ParserSpec(reasoning="deepseek_r1")):
            same, parts = await run(spec)
            assert same == text
            assert message(parts) == message(parse(text, spec))
        with pytest.raises(_core.RequestError, match="reasoning_parser must be one of"):
            llm.submit(prompt, greedy(1), parser=ParserSpec(reasoning="nope"))
