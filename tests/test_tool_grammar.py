"""Grammars of tool calls: what they allow is found by a reader, and its schema kept."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import make_llm
from miniinfer import LLM, ParameterError, SamplingParams
from miniinfer.parsing import TOOL_PARSERS
from miniinfer.tool_grammar import tool_call_grammar

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "New York", "Łódź"]},
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
    return objects(
        inner.removeprefix("<tool_call>").removesuffix("</tool_call>"), "\0", "arguments"
    )


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


def obeys(name: str, arguments: dict[str, Any]) -> bool:
    """Whether arguments are what the tool's schema says."""
    if name == "now":
        return arguments == {}
    return (
        name == "get_weather"
        and {"city", "days"} <= set(arguments) <= {"city", "days", "unit", "hourly"}
        and arguments["city"] in ("Rome", "New York", "Łódź")
        and type(arguments["days"]) is int
        and 1 <= arguments["days"] <= 9
        and arguments.get("unit", "C") in ("C", "F")
        and isinstance(arguments.get("hourly", True), bool)
    )


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    """A random model over bytes: it writes whatever it is left to write."""
    return make_llm(tiny_model, max_model_len=256, num_kv_blocks=1024)


def answers(
    llm: LLM, count: int, tool_parser: str, tools: list[Any] = TOOLS, **options: Any
) -> list[str]:
    """Whole answers that call the tools."""
    form = tool_call_grammar(tool_parser, tools, tokenizer=llm.llm_engine.tokenizer, **options)
    params = SamplingParams(
        n=count,
        temperature=1,
        seed=17,
        max_tokens=None,
        skip_special_tokens=False,
        structured_outputs=form,
    )
    (output,) = llm.generate("Rome?\n", params, use_tqdm=False)
    texts = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert texts
    return texts


def test_every_tool_parser_has_a_grammar_and_a_reader():
    assert set(READERS) == set(TOOL_PARSERS)


def test_a_hundred_of_a_hundred_forced_calls_obey_their_schema(builtin_gguf):
    # Short, for the real model takes its time.
    schema = {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}
    tools = [{"name": "go", "parameters": schema}, {"name": "stay"}]
    llm = LLM(str(builtin_gguf), max_model_len=128, max_num_seqs=100, num_kv_blocks=1000, seed=13)
    texts = answers(llm, 100, "hermes", tools=tools, parallel=False)
    assert len(texts) == 100
    for text in texts:
        (call,) = read_hermes(text)
        assert call in [("go", {"to": "a"}), ("go", {"to": "b"}), ("stay", {})], text


@pytest.mark.parametrize("tool_parser", TOOL_PARSERS)
def test_a_forced_call_is_found_by_the_reader_of_its_format(llm, tool_parser):
    texts = answers(llm, 16, tool_parser, choice="get_weather")
    # gpt-oss may reason first, and a random model does so for ever.
    assert len(texts) == 16 or tool_parser == "gpt_oss"
    for text in texts:
        ((name, arguments),) = READERS[tool_parser](text)
        assert name == "get_weather"
        assert obeys(name, arguments)


@pytest.mark.parametrize("tool_parser", [name for name in TOOL_PARSERS if name != "gpt_oss"])
def test_several_calls_are_one_after_the_other(llm, tool_parser):
    found = [READERS[tool_parser](text) for text in answers(llm, 16, tool_parser)]
    assert all(obeys(*call) for calls in found for call in calls)
    assert all(found)
    singles = answers(llm, 16, tool_parser, parallel=False)
    assert all(len(READERS[tool_parser](text)) == 1 for text in singles)


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


def test_a_schema_may_refer_to_its_own_definitions(llm):
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "$defs": {"place": {"enum": ["here", "there"]}},
    }
    tools = [{"name": "go", "parameters": parameters}]
    for tool_parser in TOOL_PARSERS:
        form = tool_call_grammar(tool_parser, tools, tokenizer=llm.llm_engine.tokenizer)
        llm.llm_engine.engine.compile_grammar(form)


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
