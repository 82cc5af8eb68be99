"""Chunks that differ in one text only: written once, then filled in."""

from __future__ import annotations

from collections.abc import Callable

from .responses import encode

_HOLE = "\N{NULL}text\N{NULL}"


class ChunkTemplate:
    """A chunk with a place for a text.

    Most chunks of a stream carry a few characters and a frame that never changes: building the
    frame anew would cost more than all else that is done for a token.
    """

    def __init__(self, write: Callable[[str], bytes]) -> None:
        """`write` makes the whole chunk of a text."""
        self._before, _, self._after = write(_HOLE).partition(encode(_HOLE))

    def fill(self, text: str) -> bytes:
        """Return what `write` would."""
        return self._before + encode(text) + self._after
