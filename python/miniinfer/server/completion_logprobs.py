"""Log probabilities in the format of the completions route."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .completion_shapes import CompletionLogprobs
from .engine_api import TokenLogprob
from .responses import finite


class LogprobWriter:
    """Writes one choice's tokens, with offsets that run on from delta to delta.

    An offset counts the characters that are complete before the token. The dictionary of
    alternatives always holds the chosen token, so it may have one more than was asked for.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write_prompt(
        self, first_token: str, first_is_text: bool, entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """Return the tokens of an echoed prompt.

        The first has no log probability, as nothing comes before it, so its text has to be given;
        `first_is_text` is false for one that the echo leaves out, such as BOS.
        """
        result = CompletionLogprobs([0], [None], [first_token], [None])
        if first_is_text:
            self._offset = len(first_token)
        result.extend(self.write([entry for entry in entries if entry is not None]))
        return result

    def write(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return the next tokens."""
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
