"""Chunks that differ in one text only: written once, then filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .responses import encode

TextKind = Literal["whole", "content", "reasoning"]
"""Which text of a delta stands in the place: all of it, or what a parser says it is."""

_HOLE = "\N{NULL}text\N{NULL}"


class ChunkTemplate:
    """A chunk with a place for a text.

    Most chunks of a stream carry a few characters and a frame that never changes: building the
    frame anew would cost more than all else that is done for a token.
    """

    def __init__(self, write: Callable[[str], bytes], kind: TextKind) -> None:
        """`write` makes the whole chunk of a text."""
        self.before, _, self.after = write(_HOLE).partition(encode(_HOLE))
        self.kind: TextKind = kind

    def fill(self, text: str) -> bytes:
        """Return what `write` would."""
        return self.before + encode(text) + self.after
