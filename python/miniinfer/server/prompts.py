"""Prompts of every form to token ids, off the event loop when that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from .config import MAX_CHOICES
from .engine_api import Tokenizer
from .errors import ApiError, invalid

Result = TypeVar("Result")

INLINE_CHARACTERS = 1024
"""Shorter texts are tokenised on the event loop: a hop to a thread costs more."""


async def run_sized(executor: Executor, characters: int, function: Callable[[], Result]) -> Result:
    """Call the function here for a short text and in the executor for a long one."""
    if characters <= INLINE_CHARACTERS:
        return function()
    return await asyncio.get_running_loop().run_in_executor(executor, function)


async def tokenize_prompts(
    prompt: Any, tokenizer: Tokenizer, executor: Executor
) -> list[list[int]]:
    """Return the ids of each prompt of a completions body.

    Takes a string, a list of strings, a list of ids, or a list that mixes strings and lists of
    ids. Raises `ApiError` 400 for anything else, for an empty prompt and for ids outside the
    vocabulary.
    """
    prompts = split_prompts(prompt)
    # Ids are looked at one by one, so they count too.
    return await run_sized(
        executor, sum(map(len, prompts)), lambda: _encode_all(prompts, tokenizer)
    )


def split_prompts(prompt: Any) -> list[str | list[Any]]:
    """Return a body's prompts, each a string or a list; raises `ApiError` 400 for other forms."""
    if prompt is None:
        raise invalid("prompt", "prompt is required", "missing_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_form(f"got {type(prompt).__name__}")
    if not prompt:
        raise _empty("prompt")
    nested = [isinstance(item, (str, list)) for item in prompt]
    if not any(nested):
        return [prompt]
    if not all(nested):
        raise _wrong_form("got a list that mixes token ids with prompts")
    if len(prompt) > MAX_CHOICES:
        raise invalid("prompt", f"prompt may hold {MAX_CHOICES} prompts, got {len(prompt)}")
    return prompt


def _encode_all(prompts: list[str | list[Any]], tokenizer: Tokenizer) -> list[list[int]]:
    encoded = []
    for position, item in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
        if isinstance(item, str):
            ids = tokenizer.encode(item)
        else:
            ids = item
            check_token_ids(ids, tokenizer.vocab_size, name)
        if not ids:
            raise _empty(name)
        encoded.append(ids)
    return encoded


def check_token_ids(ids: list[Any], vocab_size: int, name: str) -> None:
    """Raise a 400 unless every item is an integer of the vocabulary."""
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise invalid(
                name.partition("[")[0],
                f"{name}[{position}] must be a token id (an integer), got {token!r:.80}",
                "invalid_token_id",
            )
        if not 0 <= token < vocab_size:
            raise invalid(
                name.partition("[")[0],
                f"{name}[{position}] must be a token id below {vocab_size}, got {token}",
                "invalid_token_id",
            )


def _empty(name: str) -> ApiError:
    return invalid("prompt", f"{name} must not be empty", "empty_prompt")


def _wrong_form(got: str) -> ApiError:
    return invalid(
        "prompt",
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        f"token ids; {got}",
        "invalid_type",
    )
