"""What a request yields, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._core import Delta, TokenLogprob
from .sampling_params import RequestOutputKind

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "RequestState"]


@dataclass(slots=True)
class Logprob:
    """The log probability of a token at a position."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None where it is not known."""
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, it and the likeliest ones by id; None if not asked for."""
    finish_reason: str | None = None
    """None while it runs, then stop, length, abort or error."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for an end-of-sequence token."""
    error: str | None = None
    """What went wrong, if `finish_reason` is error."""

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's outputs: all so far, or what is new, as its `output_kind` says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """In order of their index. With `RequestOutputKind.DELTA`, those choices that have news."""
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, it and the likeliest ones by id; nothing predicts the first: None.

    None as a whole if not asked for; with `RequestOutputKind.DELTA` in one output only.
    """

    @property
    def text(self) -> str:
        """Text of the first choice here."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice here."""
        return self.outputs[0].token_ids

    @property
    def stop_reason(self) -> str | None:
        """How the first choice here ended: eos, stop, max_tokens, cancelled or error.

        `outputs[0].stop_reason` is another thing, vLLM's: the stop string or token that ended it.
        """
        first = self.outputs[0]
        if first.finish_reason == "stop":
            return "eos" if first.stop_reason is None else "stop"
        names = {"length": "max_tokens", "abort": "cancelled", "error": "error"}
        return names.get(first.finish_reason or "")


class RequestState:
    """Gathers the deltas of a request and makes outputs of them."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        n: int,
        kind: RequestOutputKind,
        with_logprobs: bool,
    ) -> None:
        self.request_id = request_id
        self.kind = kind
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._with_logprobs = with_logprobs
        self._choices = [self._choice(index) for index in range(n)]
        self._fresh: dict[int, CompletionOutput] = {}
        self._running = n
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def _choice(self, index: int) -> CompletionOutput:
        return CompletionOutput(index, logprobs=[] if self._with_logprobs else None)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._running == 0

    def add(self, delta: Delta) -> None:
        """Take in what a choice gained."""
        if not (delta.token_ids or delta.text or delta.finish_reason or delta.prompt_logprobs):
            # The word that a first token is there, whose text is held back.
            return
        index = delta.index
        if self.kind is RequestOutputKind.DELTA:
            target = self._fresh.setdefault(index, self._choice(index))
        else:
            target = self._fresh[index] = self._choices[index]
        if delta.prompt_logprobs is not None:
            rows = delta.prompt_logprobs
            self._prompt_logprobs = [None if row is None else _alternatives(row) for row in rows]
        target.text += delta.text
        target.token_ids += delta.token_ids
        if target.logprobs is not None:
            target.logprobs += _logprobs(delta)
        if delta.finish_reason is not None:
            target.finish_reason = delta.finish_reason
            target.stop_reason = delta.stop_reason
            target.error = delta.error
            self._running -= 1
        if index == 0:
            # The other choices share the first one's prompt.
            self._num_cached_tokens = delta.num_cached_tokens

    def take_output(self) -> RequestOutput | None:
        """What the request yields now, if anything."""
        if not self._fresh or (self.kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        fresh, self._fresh = self._fresh, {}
        outputs = [fresh[index] for index in sorted(fresh)]
        if self.kind is not RequestOutputKind.DELTA:
            # A snapshot: what is yielded now does not change later.
            outputs = [_snapshot(choice) for choice in self._choices]
        prompt_logprobs = self._prompt_logprobs
        if self.kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            self.finished,
            self._num_cached_tokens,
            prompt_logprobs,
        )


def _snapshot(choice: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        choice.index,
        choice.text,
        list(choice.token_ids),
        None if choice.logprobs is None else list(choice.logprobs),
        choice.finish_reason,
        choice.stop_reason,
        choice.error,
    )


def _logprobs(delta: Delta) -> Sequence[dict[int, Logprob]]:
    return [_alternatives(token) for token in delta.logprobs or ()]


def _alternatives(token: TokenLogprob) -> dict[int, Logprob]:
    row = {
        token_id: Logprob(logprob, rank, text)
        for rank, (token_id, text, _, logprob) in enumerate(token.top, start=1)
    }
    row[token.token_id] = Logprob(token.logprob, token.rank, token.text)
    return row
