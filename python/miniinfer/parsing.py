"""Which formats an answer's reasoning and tool calls are written in."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "ParserSpec", "Part"]

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


class ParserSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answer is to be parsed."""

    reasoning: str | None = None
    """One of `REASONING_PARSERS`, or None to leave reasoning in the content."""
    tools: str | None = None
    """One of `TOOL_PARSERS`, or None to leave tool calls in the content."""
    in_reasoning: bool = False
    """The prompt has opened the reasoning: the answer begins inside of it."""
