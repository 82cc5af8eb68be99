"""Which formats the model's answers are written in: as set, or as its tokenizer shows."""

from __future__ import annotations

from dataclasses import dataclass

from miniinfer.parser_choice import choose_reasoning_parser, choose_tool_parser

from .config import ServerConfig
from .engine_api import Tokenizer

DEFAULT_CALL_FORMAT = "hermes"
"""Taken where nothing shows a format; what a model without training for tools follows best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """Names of formats, see `miniinfer.parsing`."""

    reasoning: str | None
    """None leaves reasoning in the content."""
    tools: str | None
    """The format of calls that the model makes by itself; None leaves them in the content."""
    forced_tools: str
    """The format of calls that a request demands."""


def choose_parsers(config: ServerConfig, tokenizer: Tokenizer) -> Parsers:
    """Return the formats of the server's settings, where those say auto of the tokenizer."""
    tools: str | None = config.tool_call_parser
    if tools == "auto":
        tools = choose_tool_parser(tokenizer) or DEFAULT_CALL_FORMAT
    elif tools == "none":
        tools = None
    reasoning: str | None = config.reasoning_parser
    if reasoning == "auto":
        reasoning = choose_reasoning_parser(tokenizer)
    elif reasoning == "none":
        reasoning = None
    return Parsers(reasoning=reasoning, tools=tools, forced_tools=tools or DEFAULT_CALL_FORMAT)
