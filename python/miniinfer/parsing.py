"""Which formats an answer's reasoning and tool calls are written in, and what an answer means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from ._core import _ParserParams

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "ParserSpec", "Part", "parse", "tool_types"]

REASONING_PARSERS = ("deepseek_r1", "qwen3", "gpt_oss")
"""Names of the reasoning formats that the core can parse."""

TOOL_PARSERS = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "pythonic",
    "deepseek_v3",
    "gpt_oss",
)
"""Names of the tool-call formats that the core can parse."""

Part: TypeAlias = (
    tuple[Literal["reasoning", "content"], str]
    | tuple[Literal["tool_call"], int, str]
    | tuple[Literal["arguments"], int, str]
)
"""A piece of an answer, in the order in which the model wrote it.

("reasoning", text), ("content", text); ("tool_call", index, name) begins a call, numbered from 0 in
order of appearance; ("arguments", index, text) appends JSON text to the call's arguments.
"""

_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))


class ParserSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answer is to be parsed.

    The parts of an answer are the same streamed and whole, however it is cut. White space between
    text and a block (a call, or the reasoning) is dropped, and text that a block interrupts goes on
    on a new line. What looks like a call but is none comes back as content, as it was written;
    arguments are passed on as the model wrote them, and may be invalid JSON if it erred. Calls are
    looked for outside of reasoning only, and stop strings apply everywhere.
    """

    reasoning: str | None = None
    """One of `REASONING_PARSERS`, or None to leave reasoning in the content."""
    tools: str | None = None
    """One of `TOOL_PARSERS`, or None to leave tool calls in the content."""
    in_reasoning: bool | None = None
    """Whether the answer begins inside of the reasoning, as when the prompt has opened it.

    None: as is usual for the format, which is yes for `deepseek_r1` alone.
    """
    calls_only: bool = False
    """Beside its reasoning the answer is calls, as where a grammar makes the model call.

    Of one that is cut, a call whose name is known comes as far as it has come, and nothing as
    content.
    """
    tool_types: Mapping[str, Mapping[str, str]] = {}
    """Function to parameter to type, for `qwen3_coder`, which writes values without quotes.

    See `tool_types`. Without it a value is JSON if it can be, else text.
    """

    def submit_params(self) -> _ParserParams:
        """The core's keyword arguments."""
        return {
            "reasoning_parser": self.reasoning,
            "tool_parser": self.tools,
            "in_reasoning": self.in_reasoning,
            "calls_only": self.calls_only,
            "tool_types": self.tool_types,
        }


def parse(text: str, spec: ParserSpec) -> list[Part]:
    """Return the parts of a whole answer. Raises `RequestError` for an unknown name."""
    from . import _core

    return _core.parse(text, **spec.submit_params())


def tool_types(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, dict[str, str]]:
    """Return the parameters' types of `tools`, as the OpenAI API defines tools.

    A type is one of JSON Schema's names, or `any` where the schema leaves it open. A parameter that
    may be null has its other type. Malformed schemas declare nothing.
    """
    types: dict[str, dict[str, str]] = {}
    for tool in tools or ():
        function = _mapping(tool.get("function", tool))
        name = function.get("name")
        properties = _mapping(_mapping(function.get("parameters")).get("properties"))
        if isinstance(name, str):
            types[name] = {key: _type(_mapping(schema)) for key, schema in properties.items()}
    return types


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _type(schema: Mapping[str, Any]) -> str:
    names = _types(schema, 0) - {"null"} or _types(schema, 0)
    if names == {"integer", "number"}:
        return "number"
    return names.pop() if len(names) == 1 else "any"


def _types(schema: Mapping[str, Any], depth: int) -> set[str]:
    """All types that a schema names, by `type`, by alternatives or by its values."""
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = {declared} if isinstance(declared, str) else {str(name) for name in declared}
        return {name if name in _TYPES else "any" for name in names}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and depth < 8:
            found = [_types(_mapping(choice), depth + 1) or {"any"} for choice in choices]
            return set().union(*found)
    return set()


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), "any")
