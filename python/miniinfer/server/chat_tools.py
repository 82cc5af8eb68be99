"""From a chat's tools to what the template sees, what is parsed and what is enforced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from miniinfer.structured import StructuredOutputsParams
from miniinfer.tool_grammar import tool_call_grammar

from .engine_api import Tokenizer
from .errors import from_value_error, invalid
from .field_types import TOOL_CHOICES, TOOL_NAME
from .parsers import Parsers
from .protocol import ChatRequest, NamedToolChoice, ToolDefinition

_NAME = re.compile(TOOL_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How a request's tools take part in its answer."""

    definitions: list[dict[str, Any]] | None = None
    """What the chat template is given."""
    parser: str | None = None
    """The format in which calls are looked for; None looks for none."""
    grammar: StructuredOutputsParams | None = None
    """What makes the model call, when the request demands it."""
    named: bool = False
    """The request named the function."""


def plan_tools(body: ChatRequest, parsers: Parsers, tokenizer: Tokenizer) -> ToolPlan:
    """Check a chat's tools and its choice among them; raises `ApiError` 400."""
    tools = body.tools or []
    choice = _checked_choice(body, _checked_names(tools))
    if choice == "none":
        # A model that does not see the tools does not try to call them.
        return ToolPlan()
    definitions = tool_definitions(tools)
    if choice == "auto":
        return ToolPlan(definitions=definitions, parser=parsers.tools)
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    callable_tools = [
        tool for tool in definitions if named is None or tool["function"]["name"] == named
    ]
    try:
        grammar = tool_call_grammar(
            parsers.forced_tools,
            callable_tools,
            parallel=named is None and body.parallel_tool_calls is not False,
            tokenizer=tokenizer,
        )
    except ValueError as error:
        raise from_value_error(error, "tools") from error
    return ToolPlan(
        definitions=definitions,
        parser=parsers.forced_tools,
        grammar=grammar,
        named=named is not None,
    )


def tool_definitions(tools: list[ToolDefinition]) -> list[dict[str, Any]]:
    """Return tools as templates read them."""
    return [msgspec.to_builtins(tool) for tool in tools]


def _checked_choice(body: ChatRequest, names: list[str]) -> str | NamedToolChoice:
    choice = body.tool_choice
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, str):
        if choice not in TOOL_CHOICES:
            expected = f"one of {list(TOOL_CHOICES)} or an object that names a function"
            raise invalid("tool_choice", f"tool_choice must be {expected}, got {choice!r}")
        if names:
            return choice
        if choice == "required":
            raise invalid("tool_choice", "tool_choice is 'required', and there are no tools")
        return "none"
    if choice.type != "function":
        raise invalid("tool_choice", f"tool_choice.type must be 'function', got {choice.type!r}")
    if choice.function.name not in names:
        raise invalid(
            "tool_choice",
            f"tool_choice.function.name must be one of the tools {names}, "
            f"got {choice.function.name!r}",
        )
    return choice


def _checked_names(tools: list[ToolDefinition]) -> list[str]:
    names: dict[str, None] = {}
    for position, tool in enumerate(tools):
        place = f"tools[{position}]"
        if tool.type != "function":
            raise invalid("tools", f"{place}.type must be 'function', got {tool.type!r}")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise invalid(
                "tools",
                f"{place}.function.name must be 1 to 128 letters, digits, '_', '-' or '.', "
                f"got {name!r}",
            )
        if name in names:
            raise invalid("tools", f"{place}.function.name must be unique, got {name!r} again")
        names[name] = None
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid(
                "tools", f"{place}.function.parameters.type must be 'object', got {kind!r}"
            )
    return list(names)
