"""Prompts as callers give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from .sampling_params import ParameterError
from .tokenizer import Tokenizer

__all__ = ["Prompt", "encode_prompt"]

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """The prompt's text, if it was one, and its token ids. `ParameterError` if it is neither."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
        if "prompt" not in prompt:
            raise ParameterError(
                "prompt", "a prompt mapping must have prompt or prompt_token_ids, got neither"
            )
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    return None, _token_ids(prompt)


def _token_ids(values: Any) -> list[int]:
    if isinstance(values, bytes) or not isinstance(values, Sequence):
        kind = type(values).__name__
        raise ParameterError("prompt", f"prompt must be a text or token ids, got {kind}")
    return [value if type(value) is int and 0 <= value < 2**31 else _id(value) for value in values]


def _id(value: object) -> int:
    """A token id of another integer type, such as numpy's."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < 2**31:
        raise ParameterError("prompt", f"a token id must be an integer from 0, got {value!r}")
    return int(value)
