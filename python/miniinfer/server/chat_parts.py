"""What one choice of a chat says, piece by piece: the one reading of deltas for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miniinfer.parsing import Part

from .engine_api import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRules:
    """How the parts of a request's answers are shown."""

    parsed: bool = False
    """The engine parses the answer; otherwise all text is content."""
    include_reasoning: bool = True
    single_call: bool = False
    """Calls after the first are left out."""
    named_call: bool = False
    """The request named the function, so that a call is not the model's own reason to end."""


class ChoiceParts:
    """Reads the deltas of one choice, for whole answers and streams alike."""

    def __init__(self, rules: PartRules) -> None:
        self._rules = rules
        self.num_calls = 0

    def take(self, delta: Delta) -> list[Part]:
        """Return the parts of a delta that the request wants to see, none of them empty."""
        if self._rules.parsed:
            parts: Sequence[Part] = delta.parts
        else:
            parts = [("content", delta.text)] if delta.text else []
        wanted = [part for part in parts if self._wants(part)]
        self.num_calls += sum(part[0] == "tool_call" for part in wanted)
        return wanted

    def _wants(self, part: Part) -> bool:
        if part[0] == "reasoning":
            return self._rules.include_reasoning
        if part[0] == "content":
            return True
        return part[1] == 0 or not self._rules.single_call

    def finish_reason(self, delta: Delta) -> str | None:
        """Return why the choice ended, in OpenAI's terms; None while it runs.

        `tool_calls` needs a call, and one that the model chose to make: a function that the
        request named ends with `stop`, as OpenAI's does. A cut answer is `length` in any case, and
        one that a stop string ended is `stop`: it may have cut a call.
        """
        reason = delta.finish_reason
        stopped = isinstance(delta.stop_reason, str)
        if reason == "stop" and self.num_calls and not self._rules.named_call and not stopped:
            return "tool_calls"
        return reason
