"""Which parsers suit a model, told from its tokenizer and chat template, and from its prompts."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["choose_reasoning_parser", "choose_tool_parser", "prompt_opens_reasoning"]

_TAIL_CHARACTERS = 65536
"""How much of a prompt's end is looked at: an unfinished last message may be long."""

_DEEPSEEK_TURNS = ("<｜User｜>", "<｜Assistant｜>")
"""DeepSeek's marks of a turn, which its tokenizers do not call special."""

_OPEN_ANALYSIS = re.compile(r"<\|channel\|>analysis[^<]*<\|message\|>(?!.*<\|)", re.S)

_THINK = ("<think>", "</think>")

_TAGS = (*_THINK, "<|channel|>", "<|constrain|>", "<|message|>")
"""What stands within a turn, special or not."""


class Vocabulary(Protocol):
    """What is asked of a tokenizer, beside its `chat_template` if it has one."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of special tokens."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""


class _Marks:
    """Whether a model's chats have a mark: in its template, or without one in its vocabulary."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        template: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None)
        self._tokenizer = tokenizer
        self._source = "\n".join(template.values()) if isinstance(template, dict) else template

    def __contains__(self, mark: str) -> bool:
        if self._source is None:
            return self._tokenizer.token_to_id(mark) is not None
        return mark in self._source


def choose_tool_parser(tokenizer: Vocabulary) -> str | None:
    """Return the name of the tool-call format of `tokenizer`'s model, None if none is known.

    The chat template decides; of a model without one the vocabulary does.
    """
    marks = _Marks(tokenizer)
    if "<|channel|>" in marks and "<|message|>" in marks:
        return "gpt_oss"
    if "<｜tool▁call▁begin｜>" in marks:
        return "deepseek_v3"
    if "<function=" in marks and "<parameter=" in marks:
        return "qwen3_coder"
    if "<tool_call>" in marks:
        # GLM writes other things between the same tags.
        return None if "<arg_key>" in marks else "hermes"
    if "[TOOL_CALLS]" in marks:
        return "mistral"
    if "<|python_start|>" in marks:
        return "pythonic"
    if "<|python_tag|>" in marks or "<|start_header_id|>" in marks:
        return "llama3_json"
    return None


def choose_reasoning_parser(tokenizer: Vocabulary) -> str | None:
    """Return the name of the reasoning format of `tokenizer`'s model, None if none is known."""
    marks = _Marks(tokenizer)
    if "<|channel|>" in marks and "<|message|>" in marks:
        return "gpt_oss"
    if not any(tag in marks for tag in _THINK):
        return None
    return "deepseek_r1" if _DEEPSEEK_TURNS[1] in marks else "qwen3"


def prompt_opens_reasoning(
    prompt: str | Sequence[int], parser: str | None, tokenizer: Vocabulary
) -> bool:
    """Whether the answer to a rendered `prompt`, text or ids, begins inside of reasoning.

    That is so if the turn that the prompt ends with has opened reasoning and not closed it; with
    `deepseek_r1` it is enough that it has not closed any. What users write does not count.
    """
    if parser is None:
        return False
    turn = _last_turn(prompt, tokenizer)
    if parser == "gpt_oss":
        return _OPEN_ANALYSIS.search(turn) is not None
    opened, closed = (turn.rfind(tag) for tag in _THINK)
    return closed < 0 or opened > closed if parser == "deepseek_r1" else opened > closed


def _last_turn(prompt: str | Sequence[int], tokenizer: Vocabulary) -> str:
    """The text behind the last special token that is no tag of a format."""
    if isinstance(prompt, str):
        special = (tokenizer.decode([index], False) for index in tokenizer.special_ids)
        marks = [mark for mark in special if mark and mark not in _TAGS]
        tail = prompt[-_TAIL_CHARACTERS:]
        ends = (tail.rfind(mark) + len(mark) for mark in (*marks, *_DEEPSEEK_TURNS) if mark in tail)
        return tail[max(ends, default=0) :]
    ids = {*tokenizer.special_ids, *(tokenizer.token_to_id(mark) for mark in _DEEPSEEK_TURNS)}
    ids -= {tokenizer.token_to_id(tag) for tag in _TAGS}
    start = len(prompt)
    while start > 0 and prompt[start - 1] not in ids:
        start -= 1
    return tokenizer.decode(prompt[start:], skip_special_tokens=False)
