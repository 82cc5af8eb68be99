"""Deltas of requests that generate nothing: echoes, with or without their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from miniinfer.parsing import Part

from .engine_api import Delta, TokenLogprob
from .generation import DeltaSource, Generation, Work, count_choices, count_usage
from .responses import Usage


@dataclass(frozen=True, slots=True)
class _EchoDelta:
    """The one delta of a choice that generates nothing."""

    index: int
    num_prompt_tokens: int
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    text: str = ""
    parts: Sequence[Part] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: str | None = "length"
    stop_reason: int | str | None = None
    error: str | None = None
    num_output_tokens: int = 0


class EchoOnly(DeltaSource):
    """The source of a request for zero tokens: every choice is over at once."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        self.num_choices = count_choices(work)
        self._indices = iter(range(self.num_choices))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        for index in self._indices:
            position, choice = divmod(index, self._work[0].params.n)
            return index, _EchoDelta(choice, len(self._work[position].token_ids))
        raise StopAsyncIteration

    def usage(self) -> Usage:
        """Return the prompt's tokens."""
        return count_usage(self._work, 0, 0)


class ScoredEcho(DeltaSource):
    """The source of a request for zero tokens that wants its prompts' log probabilities.

    The engine has to generate a token for that, of which nothing is shown; the work must ask for
    one token and for the final output alone, so that there is one delta for each choice.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.num_choices = generation.num_choices

    async def __aenter__(self) -> Self:
        await self._generation.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._generation.__aexit__(exc_type, exc, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        index, delta = await self._generation.__anext__()
        return index, _EchoDelta(
            delta.index, delta.num_prompt_tokens, delta.prompt_logprobs, delta.num_cached_tokens
        )

    def usage(self) -> Usage:
        """Return the prompts' tokens."""
        usage = self._generation.usage()
        usage.completion_tokens = 0
        usage.total_tokens = usage.prompt_tokens
        return usage
