"""Grammars of tool calls: what a model must write for its calls to be found and their schemas kept.

Each format is that of the tool parser of the same name. Tags are single special tokens where the
model's tokenizer has them so, and text otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .parameters import ParameterError
from .structured import StructuredOutputsParams, closed

if TYPE_CHECKING:
    from .parser_choice import Vocabulary

__all__ = ["tool_call_grammar"]

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_MOST_CALLS = 32
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# As `json.dumps` writes it, and templates do: nothing to choose for a model that likes blanks.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_call_grammar(
    tool_parser: str,
    tools: Sequence[Mapping[str, Any]],
    choice: str = "required",
    *,
    parallel: bool = True,
    tokenizer: Vocabulary | None = None,
) -> StructuredOutputsParams:
    """The form of an answer that calls tools, in the syntax of a tool parser.

    `tools` are OpenAI's, `{"type": "function", "function": {...}}`, or the functions themselves.
    `choice` is "required" for a call of any of them, or several if `parallel`; or the name of the
    one that is called, once. Arguments obey the schema of the function's `parameters` and have no
    properties that it does not name, unless it says otherwise; without `parameters` there are
    none. `tokenizer` is the model's: it says which tags are tokens of their own.

    Raises `ParameterError` for an unknown parser, a choice that is no tool, and a bad tool. What a
    schema says is looked at when the grammar is compiled.
    """
    if tool_parser not in _FORMATS:
        names = ", ".join(_FORMATS)
        raise ParameterError(
            "tool_parser", f"tool_parser must be one of {names}; got {tool_parser!r}"
        )
    functions = [_function(tool) for tool in tools]
    if choice != "required":
        functions = [function for function in functions if function.name == choice]
        parallel = False
    if not functions:
        among = f"among the {len(tools)} tools"
        message = f"tool_choice must be a function {among}; got {choice!r}"
        raise ParameterError("tool_choice", message)
    return StructuredOutputsParams(
        grammar=_FORMATS[tool_parser](functions, _Tags(tokenizer), parallel)
    )


@dataclass(frozen=True)
class _Function:
    name: str
    schema: dict[str, Any]

    def property_rules(self) -> list[tuple[str, dict[str, Any], bool]]:
        """Name, schema and whether it is required, of each parameter."""
        shared = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        required = self.schema.get("required", [])
        rules = []
        for name, schema in self.schema.get("properties", {}).items():
            own = schema if isinstance(schema, dict) else {}
            rules.append((name, {**own, **shared}, name in required))
        return rules


def _function(tool: Mapping[str, Any]) -> _Function:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        limit = "functions whose names are 1 to 256 letters, digits and _ . : -"
        raise ParameterError("tools", f"tools must be {limit}; got {name!r}")
    schema = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        message = f"the parameters of tool {name} must be a JSON schema of an object; got {schema}"
        raise ParameterError("tools", message[:300])
    if schema.get("type", "object") != "object":
        kind = schema["type"]
        raise ParameterError(
            "tools", f"the parameters of tool {name} must be an object; got {kind}"
        )
    return _Function(name, closed({"type": "object", "properties": {}, **schema}))


class _Tags:
    """How tags are written in a grammar: a special token by its id, everything else as text."""

    def __init__(self, tokenizer: Vocabulary | None) -> None:
        self._tokenizer = tokenizer

    def id(self, tag: str) -> int | None:
        """The id of a tag that is a special token."""
        if self._tokenizer is None:
            return None
        index = self._tokenizer.token_to_id(tag)
        return index if index in self._tokenizer.special_ids else None

    def __call__(self, tag: str) -> str:
        index = self.id(tag)
        return _text(tag) if index is None else f"<[{index}]>"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})


def _grammar(start: str, calls: Sequence[str], *rules: str) -> str:
    """Rules from `start` on, where `call` is any of `calls`."""
    lines = [f"start: {start}", f"call: {' | '.join(f'call_{at}' for at in range(len(calls)))}"]
    lines += [f"call_{at}: {call}" for at, call in enumerate(calls)]
    return "\n".join([*lines, *rules, ""])


def _several(separator: str, parallel: bool) -> str:
    return f"call ({separator} call){{0,{_MOST_CALLS - 1}}}" if parallel else "call"


def _object(function: _Function, arguments: str = "arguments") -> str:
    """A call as a JSON object."""
    head = f'{{"name": {json.dumps(function.name)}, "{arguments}": '
    return f"{_text(head)} {_json(function.schema)} {_text('}')}"


def _hermes(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    opening, closing = tag("<tool_call>"), tag("</tool_call>")
    calls = [f'{opening} "\\n" {_object(each)} "\\n" {closing}' for each in functions]
    return _grammar(_several('"\\n"', parallel), calls)


def _llama3_json(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    calls = [_object(each, "parameters") for each in functions]
    return _grammar(_several('"; "', parallel), calls)


def _mistral(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    opening = tag("[TOOL_CALLS]")
    if tag.id("[ARGS]") is None:
        several = _several('", "', parallel)
        return _grammar(f'{opening} " "? "[" {several} "]"', [_object(each) for each in functions])
    calls = [
        f"{opening} {_text(each.name)} {tag('[ARGS]')} {_json(each.schema)}" for each in functions
    ]
    return _grammar(_several('""', parallel), calls)


def _deepseek_v3(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    opening, closing = tag("<｜tool▁call▁begin｜>"), tag("<｜tool▁call▁end｜>")
    calls = [
        f'{opening} "function" {tag("<｜tool▁sep｜>")} {_text(each.name)} "\\n```json\\n"'
        f' {_json(each.schema)} "\\n```" {closing}'
        for each in functions
    ]
    first, last = tag("<｜tool▁calls▁begin｜>"), tag("<｜tool▁calls▁end｜>")
    return _grammar(f"{first} {_several(_text(chr(10)), parallel)} {last}", calls)


def _gpt_oss(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    """One call, for it ends the answer; before it the model may reason."""
    channel, message = tag("<|channel|>"), tag("<|message|>")
    calls = [
        f"{channel} {_text(f'commentary to=functions.{each.name} ')} {tag('<|constrain|>')} "
        f'"json" {message} {_json(each.schema)}'
        for each in functions
    ]
    again = f'{tag("<|end|>")} {tag("<|start|>")} "assistant"'
    reasoning = f'reasoning: {channel} "analysis" {message} /(?s:[^<].*)/ {again}'
    return _grammar("reasoning? call", calls, reasoning)


def _pythonic(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    """Arguments by keyword. Their values are JSON, which the parser reads, but for truth."""
    calls, rules = [], []
    for at, function in enumerate(functions):
        calls.append(f'{_text(function.name + "(")} first_{at}_0 ")"')
        rules += _keyword_rules(at, function.property_rules())
    return _grammar(f'"[" {_several(_text(", "), parallel)} "]"', calls, *rules)


def _keyword_rules(at: int, properties: list[tuple[str, dict[str, Any], bool]]) -> list[str]:
    """Rules `first_AT_0` for all keywords, those that are not required left out at will."""
    rules = []
    for place, (name, schema, required) in enumerate(properties):
        keyword, rest = f"{_text(f'{name}=')} {_python_value(schema)}", f"rest_{at}_{place + 1}"
        later = "" if required else f" | first_{at}_{place + 1}"
        rules.append(f"first_{at}_{place}: {keyword} {rest}{later}")
        optional = "" if required else "?"
        rules.append(f'rest_{at}_{place}: (", " {keyword}){optional} {rest}')
    return [*rules, f'first_{at}_{len(properties)}: ""', f'rest_{at}_{len(properties)}: ""']


def _python_value(schema: dict[str, Any]) -> str:
    if schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
        return '("True" | "False")'
    return _json(schema)


def _qwen3_coder(functions: list[_Function], tag: _Tags, parallel: bool) -> str:
    opening, closing = tag("<tool_call>"), tag("</tool_call>")
    calls, rules = [], []
    for at, function in enumerate(functions):
        parts = []
        for place, (name, schema, required) in enumerate(function.property_rules()):
            rule = f"value_{at}_{place}"
            rules.append(_parameter_rule(rule, schema))
            part = f'{_text(f"<parameter={name}>" + chr(10))} {rule} "\\n"'
            parts.append(part if required else f"({part})?")
        head = _text(f"\n<function={function.name}>\n")
        calls.append(" ".join([opening, head, *parts, '"</function>\\n"', closing]))
    return _grammar(_several('"\\n"', parallel), calls, *rules)


def _parameter_rule(rule: str, schema: dict[str, Any]) -> str:
    """A rule for a value and the tag behind it: texts stand as they are, all else is JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        value = f"({' | '.join(map(_text, values))})"
    elif schema.get("type") == "string":
        # Whatever it says, up to the first tag that ends it.
        return f'{rule}[suffix="</parameter>"]: /(?s:.*)/'
    else:
        value = _json(schema)
    return f'{rule}: {value} "\\n</parameter>"'


_FORMATS: dict[str, Callable[[list[_Function], _Tags, bool], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
