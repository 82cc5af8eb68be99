"""Grammars of tool calls: what they allow is found by a reader, and its schema kept."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miniinfer import LLM, ParameterError, SamplingParams
from miniinfer.parsing import TOOL_PARSERS
from miniinfer.tool_grammar import tool_call_grammar

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "hourly": {"type": "boolean"},
        },
        "required": ["city", "days"],
    },
}
NOW = {"name": "now", "description": "The time."}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, NOW)]


def as_json(value: str) -> Any:
    """A value without quotes: JSON if it is that, else text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def objects(text: str, separator: str, key: str) -> list[tuple[str, Any]]:
    calls = json.loads(f"[{text.replace(separator, ', ')}]")
    return [(call["name"], call[key]) for call in calls if set(call) == {"name", key}]


def read_hermes(text: str) -> list[tuple[str, Any]]:
    inner = re.sub(r"</tool_call>\n<tool_call>", ",", text)
    return objects(inner.removeprefix("<tool_call>").removesuffix("</tool_call>"), "", "arguments")


def read_llama3_json(text: str) -> list[tuple[str, Any]]:
    return objects(text, "; ", "parameters")


def read_mistral(text: str) -> list[tuple[str, Any]]:
    match = re.fullmatch(r"\[TOOL_CALLS\] ?\[(.*)\]", text, re.S)
    assert match
    return objects(match[1], "\0", "arguments")


def read_qwen3_coder(text: str) -> list[tuple[str, Any]]:
    call = (
        r"<tool_call>\n<function=(\w+)>\n"
        r"((?:<parameter=.*?</parameter>\n)*)</function>\n</tool_call>"
    )
    assert re.fullmatch(rf"{call}(\n{call})*", text, re.S)
    parameter = re.compile(r"<parameter=(\w+)>\n(.*?)\n?</parameter>", re.S)
    return [
        (name, {key: as_json(value) for key, value in parameter.findall(body)})
        for name, body in re.findall(call, text, re.S)
    ]


def read_pythonic(text: str) -> list[tuple[str, Any]]:
    listed = ast.parse(text, mode="eval").body
    assert isinstance(listed, ast.List)
    return [
        (call.func.id, {word.arg: ast.literal_eval(word.value) for word in call.keywords})
        for call in listed.elts
    ]


def read_deepseek_v3(text: str) -> list[tuple[str, Any]]:
    call = (
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(\w+)\n"
        r"```json\n(.*?)\n```<｜tool▁call▁end｜>"
    )
    whole = rf"<｜tool▁calls▁begin｜>{call}(\n{call})*<｜tool▁calls▁end｜>"
    assert re.fullmatch(whole, text, re.S)
    return [(name, json.loads(arguments)) for name, arguments in re.findall(call, text, re.S)]


def read_gpt_oss(text: str) -> list[tuple[str, Any]]:
    call = r"<\|channel\|>commentary to=functions\.(\w+) <\|constrain\|>json<\|message\|>(.*)"
    match = re.search(call, text, re.S)
    assert match
    return [(match[1], json.loads(match[2]))]


READERS = {
    "hermes": read_hermes,
    "qwen3_coder": read_qwen3_coder,
    "llama3_json": read_llama3_json,
    "mistral": read_mistral,
    "pythonic": read_pythonic,
    "deepseek_v3": read_deepseek_v3,
    "gpt_oss": read_gpt_oss,
}


def obeys(name: str, arguments: dict[str, Any], pattern: bool = True) -> bool:
    """Whether arguments are what the tool's schema says."""
    if name == "now":
        return arguments == {}
    return (
        name == "get_weather"
        and {"city", "days"} <= set(arguments) <= {"city", "days", "unit", "hourly"}
        and (not pattern or re.fullmatch("[A-Z][a-z]{1,8}", arguments["city"]) is not None)
        and type(arguments["days"]) is int
        and 1 <= arguments["days"] <= 9
        and arguments.get("unit", "C") in ("C", "F")
        and isinstance(arguments.get("hourly", True), bool)
    )


@pytest.fixture(scope="module")
def builtin(builtin_gguf: Path) -> LLM:
    return LLM(str(builtin_gguf), max_model_len=256, max_num_seqs=50, num_kv_blocks=2000, seed=13)


def texts(llm: LLM, count: int, tool_parser: str, max_tokens: int = 120, **options: Any) -> list:
    """Whole answers of `count` choices that have this form."""
    form = tool_call_grammar(tool_parser, TOOLS, tokenizer=llm.llm_engine.tokenizer, **options)
    params = SamplingParams(
        n=count,
        temperature=1,
        max_tokens=max_tokens,
        skip_special_tokens=False,
        structured_outputs=form,
    )
    (output,) = llm.generate("How is the weather in Rome?\n", params, use_tqdm=False)
    return output.outputs


def test_every_tool_parser_has_a_grammar_and_a_reader():
    assert set(READERS) == set(TOOL_PARSERS)


def test_a_hundred_of_a_hundred_forced_calls_obey_their_schema(builtin):
    choices = texts(builtin, 100, "hermes", parallel=False)
    for choice in choices:
        assert choice.finish_reason == "stop", choice.text
        ((name, arguments),) = read_hermes(choice.text)
        assert obeys(name, arguments), choice.text


@pytest.mark.parametrize("tool_parser", [name for name in TOOL_PARSERS if name != "hermes"])
def test_a_forced_call_is_found_by_the_reader_of_its_format(builtin, tool_parser):
    named = texts(builtin, 3, tool_parser, choice="get_weather")
    for choice in named:
        if choice.finish_reason == "stop":
            ((name, arguments),) = READERS[tool_parser](choice.text)
            # Texts without quotes have no pattern.
            assert name == "get_weather"
            assert obeys(name, arguments, pattern=tool_parser != "qwen3_coder")


@pytest.mark.parametrize("tool_parser", ["hermes", "mistral", "pythonic"])
def test_several_calls_are_one_after_the_other(builtin, tool_parser):
    for choice in texts(builtin, 8, tool_parser, max_tokens=60):
        if choice.finish_reason == "stop":
            calls = READERS[tool_parser](choice.text)
            assert calls
            assert all(obeys(*call) for call in calls)


def test_tags_that_are_special_tokens_are_named_by_their_ids():
    ids = {"<tool_call>": 7, "[TOOL_CALLS]": 8, "[ARGS]": 9, "</tool_call>": 10}
    tokenizer: Any = SimpleNamespace(token_to_id=ids.get, special_ids={7, 8, 9})
    hermes = tool_call_grammar("hermes", [NOW], tokenizer=tokenizer).grammar
    assert "<[7]>" in hermes
    assert '"</tool_call>"' in hermes
    mistral = tool_call_grammar("mistral", [NOW], tokenizer=tokenizer).grammar
    assert '<[8]> "now" <[9]>' in mistral
    old = tool_call_grammar("mistral", [NOW]).grammar
    assert '"[TOOL_CALLS]" " "? "["' in old


def test_a_schema_may_refer_to_its_own_definitions(builtin):
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "$defs": {"place": {"enum": ["here", "there"]}},
    }
    tools = [{"name": "go", "parameters": parameters}]
    for tool_parser in TOOL_PARSERS:
        form = tool_call_grammar(tool_parser, tools, tokenizer=builtin.llm_engine.tokenizer)
        builtin.llm_engine.engine.compile_grammar(form)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("xml", TOOLS), "tool_parser"),
        (("hermes", []), "tool_choice"),
        (("hermes", TOOLS, "nobody"), "tool_choice"),
        (("hermes", [{"type": "function"}]), "tools"),
        (("hermes", [{"name": ""}]), "tools"),
        (("hermes", [{"name": "a b"}]), "tools"),
        (("hermes", [{"name": "a", "parameters": [1]}]), "tools"),
        (("hermes", [{"name": "a", "parameters": {"type": "array"}}]), "tools"),
        (("hermes", [{"name": "a", "parameters": {"properties": [1]}}]), "tools"),
    ],
    ids=repr,
)
def test_what_is_no_tool_is_refused_by_name(arguments, param):
    with pytest.raises(ParameterError) as caught:
        tool_call_grammar(*arguments)
    assert caught.value.param == param
    assert len(caught.value.message) < 400
