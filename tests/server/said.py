"""Answers of the scripted engine that have parts, of every kind that item APIs tell apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from miniinfer.parsing import Part
from miniinfer.sampling_params import RequestOutputKind, SamplingParams

from .fake import FakeDelta, Step, logprob

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
"""Settings under which the server reads parts, not text."""


@dataclass(frozen=True)
class Said:
    """What a model says, part by part; `kinds` are the kinds of block that this amounts to."""

    parts: tuple[Part, ...]
    kinds: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=lambda: {"finish_reason": "stop"})

    def __call__(self, ids: list[int], params: SamplingParams) -> list[Step]:
        """Return the script: a delta for each part, or one for all, as the request wants it."""
        groups = [[part] for part in self.parts] or [[]]
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            groups = [merged(self.parts)]
        steps: list[Step] = []
        produced = 0
        for position, group in enumerate(groups):
            text = "".join(str(part[-1]) for part in group)
            produced += len(text)
            last = position == len(groups) - 1
            steps.append(
                FakeDelta(
                    text,
                    parts=group,
                    logprobs=None
                    if params.logprobs is None
                    else [logprob(each, params.logprobs) for each in text],
                    num_prompt_tokens=5,
                    num_cached_tokens=2,
                    num_output_tokens=produced,
                    **(self.fields if last else {}),
                )
            )
        return steps


def merged(parts: tuple[Part, ...]) -> list[Part]:
    """Return parts with those that continue each other joined, as the engine does."""
    whole: list[Part] = []
    for head, group in groupby(parts, key=lambda part: part[:-1]):
        if head[0] == "tool_call":
            whole += group
        else:
            whole.append((*head, "".join(str(part[-1]) for part in group)))
    return whole


_CALL: tuple[Part, ...] = (
    ("tool_call", 0, "roll"),
    ("arguments", 0, '{"sides"'),
    ("arguments", 0, ": 6}"),
)
_CUT = {"finish_reason": "length"}

SAID = {
    "text": Said((("content", "Hel"), ("content", "lo 🙂")), ("content",)),
    "reasoning": Said(
        (("reasoning", "so "), ("reasoning", "it is"), ("content", "\n\n"), ("content", "Five")),
        ("reasoning", "content"),
    ),
    "call": Said(_CALL, ("tool_call",)),
    "calls": Said(
        (
            ("content", "One sec.\n"),
            *_CALL,
            ("content", "\n"),
            ("tool_call", 1, "stop"),
            ("arguments", 1, "{}"),
            ("content", "\nthen"),
        ),
        ("content", "tool_call", "tool_call", "content"),
    ),
    "everything": Said(
        (("reasoning", "hm"), ("content", "Look: "), *_CALL), ("reasoning", "content", "tool_call")
    ),
    "cut in text": Said((("content", "Hel"), ("content", "l")), ("content",), _CUT),
    "cut in reasoning": Said((("reasoning", "so "), ("reasoning", "th")), ("reasoning",), _CUT),
    "cut in a call": Said(
        (("content", "ok"), *_CALL[:2], ("arguments", 0, ': 6, "x": [1, "a')),
        ("content", "tool_call"),
        _CUT,
    ),
    "stop string": Said(
        (("content", "one "), ("content", "two")),
        ("content",),
        {"finish_reason": "stop", "stop_reason": "END"},
    ),
    "stop token": Said(
        (("content", "one"),), ("content",), {"finish_reason": "stop", "stop_reason": 7}
    ),
    "white space": Said((("content", " \n"), ("content", " ")), ("content",)),
    "empty reasoning": Said((("reasoning", "\n\n"), ("content", "Hi")), ("content",)),
}
"""Answers by name; every kind of block, in every position, ended in every way."""

SILENCE = Said((), ())
"""An answer of no text at all."""
