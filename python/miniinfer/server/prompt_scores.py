"""The log probabilities of prompts, for all choices of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .engine_api import Delta, TokenLogprob


class PromptScores:
    """Shares what the engine says of a prompt among the prompt's choices.

    The engine says it once, with the first delta of the first choice, and each choice of the
    answer begins with it: the deltas of the others wait until then.
    """

    def __init__(self, choices_per_prompt: int) -> None:
        self._per_prompt = choices_per_prompt
        self._scores: dict[int, Sequence[TokenLogprob | None]] = {}
        self._waiting: dict[int, list[tuple[int, Delta]]] = {}

    def take(self, index: int, delta: Delta) -> list[tuple[int, Delta]]:
        """Return the deltas that can be shown now that this one of the choice `index` is there."""
        prompt = index // self._per_prompt
        if prompt in self._scores:
            return [(index, delta)]
        if index % self._per_prompt:
            self._waiting.setdefault(prompt, []).append((index, delta))
            return []
        # Of a prompt of one token there is nothing to say.
        self._scores[prompt] = delta.prompt_logprobs or [None]
        return [(index, delta), *self._waiting.pop(prompt, [])]

    def of(self, index: int) -> Sequence[TokenLogprob | None]:
        """Return the prompt's entries for a choice whose deltas can be shown."""
        return self._scores[index // self._per_prompt]
