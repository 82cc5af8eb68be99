"""Completions as answers, whole or as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from .chunk_template import ChunkTemplate
from .completion_logprobs import LogprobWriter
from .completion_shapes import Completion, CompletionChoice, CompletionLogprobs
from .engine_api import Delta
from .envelope import SYSTEM_FINGERPRINT, Envelope
from .errors import ApiError
from .generation import DeltaSource
from .prompt_scores import PromptScores
from .protocol import CompletionRequest
from .responses import Usage, encode, prompt_logprobs
from .sse import event
from .stream_usage import StreamUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """What the answers to one prompt may repeat of it."""

    token_ids: list[int]
    text: str = ""
    first_token: str = ""
    """The text of its first token."""
    first_is_text: bool = True
    """That text is part of `text`."""


class CompletionWriter:
    """Writes completions, whole or as chunks; see `sse.StreamFormat`.

    The chunks of a choice: its prompt if the request wants to see it, then its text, then one with
    the finish reason and no text. A whole answer is the same chunks added up.
    """

    def __init__(
        self,
        envelope: Envelope,
        source: DeltaSource,
        echoes: Sequence[PromptEcho],
        body: CompletionRequest,
    ) -> None:
        self._envelope = envelope
        self._source = source
        self._body = body
        per_prompt = source.num_choices // len(echoes)
        self._echoes = [echo for echo in echoes for _ in range(per_prompt)]
        self._logprobs = [LogprobWriter(body.logprobs or 0) for _ in self._echoes]
        self._usage = StreamUsage(source, body.stream_options)
        self._unopened = set(range(source.num_choices))
        self._scores = None if prompt_alternatives(body) is None else PromptScores(per_prompt)
        self._text_alone = (
            body.logprobs is None and not body.return_token_ids and not self._usage.always
        )
        """Chunks in the middle of a choice differ in their text alone."""
        self._templates: dict[int, ChunkTemplate] = {}

    def start(self) -> bytes:
        """Return nothing: what comes first may need the first delta."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of one delta, or of those that have waited for it."""
        template = self._templates.get(index)
        if template is not None and delta.finish_reason is None:
            text = delta.text
            return template.fill(text) if text else b""
        events = b"".join(self._chunk([choice]) for choice in self._choices(index, delta))
        if self._text_alone and delta.finish_reason is None and index not in self._unopened:
            self._templates[index] = ChunkTemplate(
                lambda text: self._chunk([CompletionChoice(index=index, text=text)]), "whole"
            )
        return events

    def template(self, index: int) -> ChunkTemplate | None:
        """Return what the chunks of more text are like, from the last delta on."""
        return self._templates.get(index)

    def end(self) -> bytes:
        """Return the usage chunk if it was asked for."""
        return self._chunk([], self._source.usage()) if self._usage.included else b""

    def error(self, error: ApiError) -> bytes:
        """Return the error object."""
        return event(error.body())

    async def whole_answer(self) -> Completion:
        """Run the request to its end and return all of it."""
        choices = [
            CompletionChoice(index=index, text="") for index in range(self._source.num_choices)
        ]
        async with self._source as source:
            async for index, delta in source:
                for choice in self._choices(index, delta):
                    choices[choice.index].add(choice)
        return self._completion(choices, self._source.usage())

    def _choices(self, index: int, delta: Delta) -> list[CompletionChoice]:
        """Return what a delta adds to its choice, or to those that have waited for it."""
        ready = [(index, delta)] if self._scores is None else self._scores.take(index, delta)
        return [choice for item in ready for choice in self._choices_of(*item)]

    def _choices_of(self, index: int, delta: Delta) -> list[CompletionChoice]:
        choices = []
        if index in self._unopened:
            self._unopened.discard(index)
            choices += self._opening(index)
        logprobs = self._logprobs[index].write(delta.logprobs) if delta.logprobs else None
        token_ids = list(delta.token_ids) if self._body.return_token_ids else UNSET
        if delta.text or logprobs or token_ids:
            choices.append(
                CompletionChoice(
                    index=index, text=delta.text, logprobs=logprobs, token_ids=token_ids
                )
            )
        if delta.finish_reason is not None:
            choices.append(
                CompletionChoice(
                    index=index,
                    text="",
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return choices

    def _opening(self, index: int) -> list[CompletionChoice]:
        """Return what the request wants to see of a choice's prompt."""
        echo, body = self._echoes[index], self._body
        scores = None if self._scores is None else self._scores.of(index)
        logprobs: CompletionLogprobs | None = None
        if body.echo and body.logprobs is not None and scores is not None:
            writer = self._logprobs[index]
            logprobs = writer.write_prompt(echo.first_token, echo.first_is_text, scores)
        opening = CompletionChoice(
            index=index,
            text=echo.text,
            logprobs=logprobs,
            prompt_token_ids=echo.token_ids if body.return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if body.prompt_logprobs is None
            else prompt_logprobs(scores, body.prompt_logprobs),
        )
        shown = opening.text or logprobs or opening.prompt_token_ids or opening.prompt_logprobs
        return [opening] if shown else []

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return event(encode(self._completion(choices, usage or self._usage.of_chunk())))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=usage,
        )


def prompt_alternatives(body: CompletionRequest) -> int | None:
    """Return how many alternatives to each token of the prompt a body needs; None for none."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)
