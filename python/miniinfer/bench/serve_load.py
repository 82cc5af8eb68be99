"""What the load client sends, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Short common words, each about one token to most tokenizers.
_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by hot but some what there we can out other were all your when up use word how said an "
    "each she which do their time if will way about many then them would write like so these her "
    "long make thing see him two has look more day could go come did my sound no most number who "
    "over know water than call first people may down side been now find"
)
_WORDS = _TEXT.split()


def random_bodies(
    count: int, words: int, max_tokens: int, endpoint: str, seed: int, shared_words: int = 0
) -> list[dict[str, Any]]:
    """Return bodies with prompts of random words, the first `shared_words` the same in all."""
    generator = random.Random(seed)
    shared = generator.choices(_WORDS, k=shared_words)
    bodies = []
    for _ in range(count):
        prompt = " ".join(shared + generator.choices(_WORDS, k=max(1, words - shared_words)))
        bodies.append(_body({"prompt": prompt}, max_tokens, endpoint))
    return bodies


def bodies_from_file(
    path: Path, count: int, max_tokens: int, endpoint: str
) -> list[dict[str, Any]]:
    """Return `count` bodies from a file, from its start again if it has fewer.

    Each line of a `.jsonl` file is an object with `prompt` or `messages` and any other field of a
    request; each line of another file is a prompt. Raises `ValueError` naming the file or the
    line.
    """
    lines = [line for line in _text_of(path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompts")
    fields: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if path.suffix != ".jsonl":
            fields.append({"prompt": line})
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            raise ValueError(f"{path}, line {number}: needs either prompt or messages")
        fields.append(entry)
    return [_body(fields[at % len(fields)], max_tokens, endpoint) for at in range(count)]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read the prompts in {str(path)!r}: {reason}") from error


def _body(fields: dict[str, Any], max_tokens: int, endpoint: str) -> dict[str, Any]:
    fields = {"max_tokens": max_tokens, **fields}
    if endpoint == "chat" and "prompt" in fields:
        fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
    elif endpoint == "completions" and "messages" in fields:
        raise ValueError("messages can be sent to the chat endpoint alone")
    return {**fields, "stream": True, "stream_options": {"include_usage": True}}


def poisson_arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Yield the seconds after the start at which each request of an open loop goes out."""
    generator = random.Random(seed)
    at = 0.0
    for _ in range(count):
        yield at
        at += generator.expovariate(rate)
