"""Log probabilities in the format of the completions route."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .completion_shapes import CompletionLogprobs
from .engine_api import TokenLogprob
from .responses import finite


class LogprobWriter:
    """Writes one choice's tokens, with offsets that run on from delta to delta."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Sequence[TokenLogprob] | None) -> CompletionLogprobs | None:
        """Return the next tokens; None if the request asked for none.

        An offset counts the characters that are complete before the token. The dictionary of
        alternatives always holds the chosen token, so it may have one more than was asked for.
        """
        if entries is None:
            return None
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token = token_name(entry.text, entry.bytes)
            logprob = finite(entry.logprob)
            top = {token_name(text, raw): finite(p) for _, text, raw, p in entry.top[: self._top]}
            top.setdefault(token, logprob)
            result.text_offset.append(self._offset)
            result.tokens.append(token)
            result.token_logprobs.append(logprob)
            result.top_logprobs.append(top)
            self._offset += len(self._decoder.decode(entry.bytes))
        return result


def token_name(text: str, raw: bytes) -> str:
    """Return a token's text, or OpenAI's `bytes:\\xe2\\x80` for one that is no whole character.

    Such tokens would all read as U+FFFD, and be one key among the alternatives.
    """
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text
