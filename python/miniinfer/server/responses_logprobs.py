"""The log probabilities of a message's text, out of those of all tokens of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from .chat_shapes import ChatTokenLogprob, chat_logprobs
from .engine_api import TokenLogprob


class TextLogprobs:
    """Finds the tokens that a piece of text came from.

    Reasoning, tool calls and the marks around them are tokens too, and a piece of text may come
    deltas later than its first token. So tokens wait here until the text that they spell appears;
    those before it belong to something else. Text that no waiting token spells takes all of them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._waiting: deque[ChatTokenLogprob] = deque()
        self._spelled = b""
        """The bytes of the waiting tokens, from the first that no text has taken."""
        self._taken = 0
        """How many bytes of the first waiting token the text has taken."""

    def add(self, entries: Sequence[TokenLogprob] | None) -> None:
        """Take in a delta's entries."""
        new = chat_logprobs(entries, self._top)
        if new is not None:
            self._waiting.extend(new.content)
            self._spelled += b"".join(bytes(entry.bytes) for entry in new.content)

    def skip(self, text: str) -> None:
        """Pass over the tokens of text that reports none: reasoning, or a call's arguments."""
        raw = text.encode()
        at = self._find(raw)
        if at is not None:
            self._take_until(at + len(raw), at)

    def take(self, text: str) -> list[ChatTokenLogprob]:
        """Return the tokens of the next piece of text; each token is returned once."""
        raw = text.encode()
        at = self._find(raw)
        if at is None:
            return self._take_until(len(self._spelled), 0)
        return self._take_until(at + len(raw), at)

    def _find(self, raw: bytes) -> int | None:
        """Return where the waiting bytes hold these, if they do: best where a token begins.

        Text that goes on in the middle of a token does so at the first waiting byte.
        """
        at = first = self._spelled.find(raw)
        if at <= 0:
            return None if at < 0 else at
        starts = set(accumulate((len(each.bytes) for each in self._waiting), initial=-self._taken))
        while at >= 0:
            if at in starts:
                return at
            at = self._spelled.find(raw, at + 1)
        return first

    def _take_until(self, end: int, start: int) -> list[ChatTokenLogprob]:
        """Return the tokens that begin in front of byte `end` and reach past `start`."""
        taken = []
        position = -self._taken
        while self._waiting and position < end:
            length = len(self._waiting[0].bytes)
            if position >= 0 and position + length > start:
                taken.append(self._waiting[0])
            if position + length > end:
                break
            position += length
            self._waiting.popleft()
        self._taken = end - position
        self._spelled = self._spelled[end:]
        return taken
