"""An answer's parts as a sequence of blocks: reasoning, text and tool calls, one after another.

The APIs whose answers are lists of items (`/v1/responses`, `/v1/messages`) are written from these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from miniinfer.parsing import Part

TextKind: TypeAlias = Literal["reasoning", "content"]
Kind: TypeAlias = Literal["reasoning", "content", "tool_call"]


@dataclass(slots=True)
class Block:
    """One item of an answer; `name` is a tool call's function."""

    index: int
    kind: Kind
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text so far; for a tool call, its arguments as JSON."""
        return "".join(self.pieces)


BlockEvent: TypeAlias = (
    tuple[Literal["open", "close"], Block, None] | tuple[Literal["append"], Block, str]
)
"""A block begins, gains text or is over. At most one is open at any time."""


class BlockReader:
    """Splits an answer into blocks.

    White space between blocks makes no block of its own: models write it around tool calls, and
    clients may not send it back. An answer of nothing but white space keeps it.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._blank = ""
        self._blank_kind: TextKind = "content"

    def read(self, parts: Iterable[Part]) -> list[BlockEvent]:
        """Return what the parts add."""
        events: list[BlockEvent] = []
        for part in parts:
            if part[0] == "tool_call":
                events += self._begin("tool_call", part[2])
            elif part[0] == "arguments":
                # Models write one call after another, so these are the newest call's.
                events += self._append("tool_call", part[2])
            else:
                events += self._read_text(part[0], part[1])
        return events

    def finish(self) -> list[BlockEvent]:
        """Close what is open: the answer is over."""
        events: list[BlockEvent] = []
        if not self.blocks and self._blank and self._blank_kind == "content":
            blank = self._blank
            events = [*self._begin("content"), *self._append("content", blank)]
        return events + self._close()

    def _read_text(self, kind: TextKind, text: str) -> list[BlockEvent]:
        if self._open is not None and self._open.kind == kind:
            return self._append(kind, text)
        if kind != self._blank_kind:
            self._blank, self._blank_kind = "", kind
        self._blank += text
        if not self._blank.strip():
            return []
        text = self._blank
        return [*self._begin(kind), *self._append(kind, text)]

    def _begin(self, kind: Kind, name: str = "") -> list[BlockEvent]:
        self._blank = ""
        closed = self._close()
        self._open = Block(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        return [*closed, ("open", self._open, None)]

    def _append(self, kind: Kind, text: str) -> list[BlockEvent]:
        assert self._open is not None, "parsers name a call before its arguments"
        assert self._open.kind == kind, "parsers end a call before other text"
        if not text:
            return []
        self._open.pieces.append(text)
        return [("append", self._open, text)]

    def _close(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [("close", block, None)]


def reasoning_tokens(blocks: Iterable[Block], output_tokens: int) -> int:
    """Return about how many of an answer's tokens are reasoning: its share of the text.

    The engine counts tokens per answer, not per part.
    """
    lengths = {"reasoning": 0, "content": 0, "tool_call": 0}
    for block in blocks:
        lengths[block.kind] += len(block.name) + sum(map(len, block.pieces))
    total = sum(lengths.values())
    return round(output_tokens * lengths["reasoning"] / total) if total else 0
