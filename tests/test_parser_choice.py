"""The parsers chosen for models, and what prompts say about the answer's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miniinfer.parser_choice import (
    choose_reasoning_parser,
    choose_tool_parser,
    prompt_opens_reasoning,
)
from miniinfer.parsing import REASONING_PARSERS, TOOL_PARSERS
from miniinfer.tokenizer import Tokenizer

# Name of the tokenizer to reasoning and tool parser.
REAL = {
    "llama2": (None, None),
    "llama3_1": (None, "llama3_json"),
    "qwen3": ("qwen3", "hermes"),
    "gemma3": (None, None),
    "deepseek_v3": (None, "deepseek_v3"),
    "gptoss": ("gpt_oss", "gpt_oss"),
    "mistral_nemo": (None, "mistral"),
}

# What tells each family's template from the others'.
TEMPLATES = {
    "<tools>{{ tools }}</tools> <tool_call>{...}</tool_call>": (None, "hermes"),
    "<tool_call>\n<function=a>\n<parameter=b>\n</tool_call>": (None, "qwen3_coder"),
    "<tool_call>{name}\n<arg_key>{k}</arg_key> <think>": ("qwen3", None),
    "<｜Assistant｜><think>\n <｜tool▁call▁begin｜>": ("deepseek_r1", "deepseek_v3"),
    "<|im_start|>assistant\n<think>\n": ("qwen3", None),
    "[SYSTEM_PROMPT] [TOOL_CALLS]{{ name }}[ARGS]": (None, "mistral"),
    "<|header_start|> <|python_start|>": (None, "pythonic"),
    "<|start_header_id|> <|python_tag|>": (None, "llama3_json"),
    "<|start|>assistant<|channel|>final<|message|>": ("gpt_oss", "gpt_oss"),
    "<|im_start|>{{ role }}": (None, None),
}


class FakeTokenizer:
    """Characters are ids; special tokens come after."""

    def __init__(
        self, template: str | dict[str, str] | None, special: Sequence[str] = (), plain: Any = ()
    ) -> None:
        self.chat_template = template
        self._tokens = {token: 0x110000 + at for at, token in enumerate((*special, *plain))}
        self._special = special

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokens[token] for token in self._special)

    def token_to_id(self, token: str) -> int | None:
        return self._tokens.get(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        names = {index: token for token, index in self._tokens.items()}
        return "".join(names.get(index) or chr(index) for index in ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((token for token in self._tokens if text.startswith(token)), text[0])
            ids.append(self._tokens.get(token) or ord(token))
            text = text[len(token) :]
        return ids


def test_real_tokenizers_get_their_parsers(real_tokenizers: dict[str, Path]) -> None:
    assert set(REAL) == set(real_tokenizers)
    for name, expected in REAL.items():
        tokenizer = Tokenizer.from_directory(real_tokenizers[name])
        chosen = (choose_reasoning_parser(tokenizer), choose_tool_parser(tokenizer))
        assert chosen == expected, name


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items())
def test_templates_tell_families_apart(
    template: str, expected: tuple[str | None, str | None]
) -> None:
    for source in (template, {"default": "{{ x }}", "tool_use": template}):
        tokenizer = FakeTokenizer(source)
        chosen = (choose_reasoning_parser(tokenizer), choose_tool_parser(tokenizer))
        assert chosen == expected
    # A tokenizer may have no notion of templates at all.
    del tokenizer.chat_template
    assert choose_tool_parser(tokenizer) is None
    assert expected[0] is None or expected[0] in REASONING_PARSERS
    assert expected[1] is None or expected[1] in TOOL_PARSERS


def test_the_vocabulary_counts_only_without_a_template() -> None:
    bare = FakeTokenizer(None, plain=["<tool_call>", "<think>", "</think>"])
    assert (choose_reasoning_parser(bare), choose_tool_parser(bare)) == ("qwen3", "hermes")
    bare.chat_template = "{{ messages }}"
    assert (choose_reasoning_parser(bare), choose_tool_parser(bare)) == (None, None)


PROMPTS = [
    ("qwen3", "<|im_start|>assistant\n<think>\n", True),
    ("qwen3", "<|im_start|>assistant\n", False),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("qwen3", "<|im_start|>assistant\n<think>\nI was just abo", True),
    ("qwen3", "<|im_start|>assistant\n<think>\na\n</think>\nSo", False),
    ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ("qwen3", "<think>", True),
    ("qwen3", "", False),
    ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜><think>\n", True),
    ("deepseek_r1", "<｜User｜>Hi</think><｜Assistant｜>", True),
    ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜></think>", False),
    ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜><think></think>So", False),
    ("gpt_oss", "<|start|>user<|message|>Hi<|end|><|start|>assistant", False),
    ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>We", True),
    ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>We<|end|>", False),
    ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", False),
    (None, "<think>", False),
]


@pytest.mark.parametrize(("parser", "prompt", "expected"), PROMPTS)
def test_prompts_open_reasoning(parser: str | None, prompt: str, expected: bool) -> None:
    turns = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    plain = ("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>")
    for tokenizer in (FakeTokenizer("", turns, plain), FakeTokenizer("", (*turns, *plain))):
        assert prompt_opens_reasoning(prompt, parser, tokenizer) is expected
        assert prompt_opens_reasoning(tokenizer.encode(prompt), parser, tokenizer) is expected


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_the_real_template_without_thinking_opens_nothing(
    real_tokenizers: dict[str, Path], enable_thinking: bool
) -> None:
    tokenizer = Tokenizer.from_directory(real_tokenizers["qwen3"])
    chat = [{"role": "user", "content": "What is <think>?"}]
    prompt = tokenizer.apply_chat_template(chat, enable_thinking=enable_thinking)
    assert prompt.endswith("</think>\n\n") is not enable_thinking
    for form in (prompt, prompt + "<think>\n"):
        opened = form != prompt
        assert prompt_opens_reasoning(form, "qwen3", tokenizer) is opened
        ids = tokenizer.encode_rendered(form)
        assert prompt_opens_reasoning(ids, "qwen3", tokenizer) is opened
