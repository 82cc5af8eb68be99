"""How a chat's answers are parsed, and where in them a form begins."""

from __future__ import annotations

from miniinfer.parser_choice import prompt_opens_reasoning
from miniinfer.parsing import ParserSpec, tool_types

from .chat_tools import ToolPlan
from .engine_api import Tokenizer
from .parsers import Parsers

_REASONING_ENDS = {"deepseek_r1": "</think>", "qwen3": "</think>"}
_FINAL_CHANNEL = "<|channel|>final<|message|>"


def parser_of(
    parsers: Parsers, plan: ToolPlan, token_ids: list[int], tokenizer: Tokenizer
) -> ParserSpec | None:
    """Return how the answers to a prompt are parsed; None if nothing is looked for."""
    if parsers.reasoning is None and plan.parser is None:
        return None
    in_reasoning = parsers.reasoning is not None and prompt_opens_reasoning(
        token_ids, parsers.reasoning, tokenizer
    )
    return ParserSpec(
        reasoning=parsers.reasoning,
        tools=plan.parser,
        in_reasoning=in_reasoning,
        calls_only=plan.grammar is not None,
        tool_types=tool_types(plan.definitions),
    )


def form_begins_after(
    parser: ParserSpec | None, plan: ToolPlan, tokenizer: Tokenizer
) -> list[int] | None:
    """Return the ids after which the answer has its form; None: from its first token on.

    Reasoning is free text, so a form waits for its end where the prompt has opened it. A grammar of
    tool calls has the channels of gpt_oss in it.
    """
    if parser is None or parser.reasoning is None:
        return None
    if parser.reasoning == "gpt_oss":
        end = None if plan.grammar is not None else _FINAL_CHANNEL
    else:
        end = _REASONING_ENDS[parser.reasoning] if parser.in_reasoning else None
    return None if end is None else tokenizer.encode(end, False)
