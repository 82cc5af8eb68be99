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


def check_text(text: str, tokenizer: Tokenizer, max_tokens: int | None, param: str) -> None:
    """Raise a 400 for a text that has more tokens than `max_tokens`, however they fall.

    Tokenising megabytes takes seconds, which a text that can never run need not cost.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return
    longest = tokenizer.longest_token
    if longest is None:
        return
    size = len(text.encode("utf-8", "replace"))
    at_least = -(-size // longest)
    if at_least > max_tokens:
        raise too_long(
            f"{size} bytes of text have at least {at_least} tokens, of {longest} bytes at most",
            max_tokens,
            param,
        )


def too_long(what: str, max_model_len: int, param: str) -> ApiError:
    """Return the 400 of a request that the context cannot hold."""
    message = (
        f"this model's maximum context length is {max_model_len} tokens (--max-model-len), "
        f"but {what}"
    )
    return invalid(param, message, "context_length_exceeded")


async def tokenize_prompts(
    prompt: Any, tokenizer: Tokenizer, executor: Executor, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the ids of each prompt of a completions body.

    Takes a string, a list of strings, a list of ids, or a list that mixes strings and lists of
    ids. Raises `ApiError` 400 for anything else, for an empty prompt, for ids outside the
    vocabulary, and for texts that clearly have more than `max_tokens`.
    """
    prompts = split_prompts(prompt)
    # Ids are looked at one by one, so they count too.
    return await run_sized(
        executor, sum(map(len, prompts)), lambda: _encode_all(prompts, tokenizer, max_tokens)
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


def _encode_all(
    prompts: list[str | list[Any]], tokenizer: Tokenizer, max_tokens: int | None
) -> list[list[int]]:
    encoded = []
    for position, item in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
        if isinstance(item, str):
            check_text(item, tokenizer, max_tokens, "prompt")
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
