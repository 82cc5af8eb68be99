"""Which of several engines gets a request: one that knows its prompt, if it is not too busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Router"]

_BLOCK = 64
"""Tokens of a block. Engines share smaller ones; what is shorter is cheap to compute."""

_MOST_BLOCKS = 128
"""Blocks of a prompt that are looked at: prompts that agree in so many agree enough."""

_IMBALANCE = 2.0
"""How many times the load of the least loaded engine, and a block, a prefix is worth."""


class Router:
    """Remembers where the prefixes of recent prompts went.

    Args:
        capacity: Blocks remembered; the oldest are forgotten.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, got {capacity}")
        self._capacity = capacity
        self._homes: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def choose(self, prompt: Sequence[int], salt: str | None, loads: Sequence[float | None]) -> int:
        """The engine for a prompt.

        `loads` has the tokens that each engine still has to compute, None for one that takes no
        requests. At least one must take some.
        """
        open_engines = [engine for engine, load in enumerate(loads) if load is not None]
        if not open_engines:
            raise ValueError("at least one engine must take requests, got none")
        blocks = self._blocks(prompt, salt)
        least = min(open_engines, key=lambda engine: loads[engine] or 0.0)
        known = self._longest(blocks)
        chosen = least
        if known in open_engines:
            limit = _IMBALANCE * (loads[least] or 0.0) + max(_BLOCK, len(prompt))
            if (loads[known] or 0.0) <= limit:
                chosen = known
        self._remember(blocks, chosen)
        return chosen

    def forget(self, engine: int) -> None:
        """The engine has lost its cache."""
        for block in [block for block, home in self._homes.items() if home == engine]:
            del self._homes[block]

    @staticmethod
    def _blocks(prompt: Sequence[int], salt: str | None) -> list[int]:
        """A number for each prefix of whole blocks."""
        number = hash(salt)
        numbers = []
        whole = min(len(prompt) // _BLOCK, _MOST_BLOCKS) * _BLOCK
        for start in range(0, whole, _BLOCK):
            number = hash((number, *prompt[start : start + _BLOCK]))
            numbers.append(number)
        return numbers

    def _longest(self, blocks: list[int]) -> int:
        """Where the longest known prefix went, or -1."""
        home = -1
        for block in blocks:
            found = self._homes.get(block)
            if found is None:
                break
            home = found
        return home

    def _remember(self, blocks: list[int], engine: int) -> None:
        for block in blocks:
            self._homes[block] = engine
            self._homes.move_to_end(block)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)
