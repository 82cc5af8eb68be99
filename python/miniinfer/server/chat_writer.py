"""Chats as answers, whole or as chunks."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from miniinfer.parsing import Part

from .chat_message import MessageBuilder, chat_delta
from .chat_parts import ChoiceParts
from .chat_prepare import PreparedChat
from .chat_shapes import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    chat_logprobs,
)
from .chunk_template import ChunkTemplate
from .engine_api import Delta
from .envelope import SYSTEM_FINGERPRINT, Envelope
from .errors import ApiError
from .generation import Generation
from .protocol import ChatRequest
from .responses import PromptLogprobs, Usage, encode, prompt_logprobs
from .sse import event
from .stream_usage import StreamUsage


class ChatWriter:
    """Writes a chat, whole or as chunks; see `sse.StreamFormat`.

    The chunks of a choice: its role, then one for each part, then one with the finish reason and
    nothing else.
    """

    def __init__(
        self, envelope: Envelope, generation: Generation, prepared: PreparedChat, body: ChatRequest
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._prepared = prepared
        self._usage = StreamUsage(generation, body.stream_options)
        self._with_token_ids = bool(body.return_token_ids)
        self._prompt_top = body.prompt_logprobs
        # Every tier is served alike, which OpenAI calls default.
        self._service_tier = UNSET if body.service_tier is None else "default"
        self._choices = [ChoiceParts(prepared.rules) for _ in range(generation.num_choices)]
        self._templates: dict[tuple[int, str], ChunkTemplate] = {}
        self._latest: ChunkTemplate | None = None

    def start(self) -> bytes:
        """Return one role chunk for each choice, and the echo if there is one."""
        return b"".join(self._beginning(index) for index in range(len(self._choices)))

    def _beginning(self, index: int) -> bytes:
        role = ChatDelta(role="assistant", content="")
        ids = self._prompt_token_ids() if index == 0 else UNSET
        chunk = self._chunk([ChatChunkChoice(index=index, delta=role)], prompt_token_ids=ids)
        if self._prepared.echo:
            echo = ChatDelta(content=self._prepared.echo)
            chunk += self._chunk([ChatChunkChoice(index=index, delta=echo)])
        return chunk

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return a chunk for each part, and a finish chunk if the choice is over."""
        parts = self._choices[index].take(delta)
        self._latest = None
        if len(parts) == 1 and self._is_text_alone(delta):
            part = parts[0]
            if part[0] == "content" or part[0] == "reasoning":
                return self._text_chunk(index, part[0], part[1])
        choices = [ChatChunkChoice(index=index, delta=chat_delta(part)) for part in parts]
        logprobs = chat_logprobs(delta.logprobs or None, self._prepared.top_logprobs)
        token_ids = list(delta.token_ids) if self._with_token_ids else UNSET
        scores = self._prompt_logprobs(index, delta)
        if logprobs is not None or token_ids or scores:
            # What belongs to tokens and not to a part goes with the first part, if there is one.
            if not choices:
                choices.append(ChatChunkChoice(index=index, delta=ChatDelta()))
            choices[0].logprobs = logprobs
            choices[0].token_ids = token_ids
        reason = self._choices[index].finish_reason(delta)
        if reason is not None:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=ChatDelta(),
                    finish_reason=reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return b"".join(
            self._chunk([choice], scores=UNSET if position else scores)
            for position, choice in enumerate(choices)
        )

    def _is_text_alone(self, delta: Delta) -> bool:
        """Whether a chunk of the delta differs in its text alone from the others."""
        return (
            delta.finish_reason is None
            and not delta.logprobs
            and delta.prompt_logprobs is None
            and not self._with_token_ids
            and not self._usage.always
        )

    def _text_chunk(self, index: int, kind: Literal["content", "reasoning"], text: str) -> bytes:
        template = self._templates.get((index, kind))
        if template is None:

            def write(text: str) -> bytes:
                part: Part = (kind, text)
                return self._chunk([ChatChunkChoice(index=index, delta=chat_delta(part))])

            shown = kind if self._prepared.rules.parsed else "whole"
            template = self._templates[index, kind] = ChunkTemplate(write, shown)
        self._latest = template
        return template.fill(text)

    def template(self, index: int) -> ChunkTemplate | None:
        """Return what the chunks of more text are like, if the last delta was a text."""
        return self._latest

    def end(self) -> bytes:
        """Return the usage chunk if it was asked for."""
        return self._chunk([], self._generation.usage()) if self._usage.included else b""

    def error(self, error: ApiError) -> bytes:
        """Return the error object."""
        return event(error.body())

    async def whole_answer(self) -> ChatCompletion:
        """Run the request to its end and return all of it."""
        choices = [_WholeChoice(reader, self._prepared) for reader in self._choices]
        scores: PromptLogprobs | UnsetType = UNSET
        async with self._generation as generation:
            async for index, delta in generation:
                choices[index].add(delta)
                scores = self._prompt_logprobs(index, delta) or scores
        return ChatCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[
                choice.finish(index, self._with_token_ids) for index, choice in enumerate(choices)
            ],
            usage=self._generation.usage(),
            service_tier=self._service_tier,
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=scores,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._prepared.work.token_ids if self._with_token_ids else UNSET

    def _prompt_logprobs(self, index: int, delta: Delta) -> PromptLogprobs | UnsetType:
        """Return the prompt's log probabilities, once for all choices."""
        if self._prompt_top is None or index:
            return UNSET
        return prompt_logprobs(delta.prompt_logprobs, self._prompt_top)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        *,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        scores: PromptLogprobs | UnsetType = UNSET,
    ) -> bytes:
        chunk = ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=usage or self._usage.of_chunk(),
            service_tier=self._service_tier,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=scores,
        )
        return event(encode(chunk))


class _WholeChoice:
    """Gathers the deltas of one choice."""

    def __init__(self, reader: ChoiceParts, prepared: PreparedChat) -> None:
        self._reader = reader
        self._top = prepared.top_logprobs
        self._message = MessageBuilder(prepared.echo)
        self._logprobs: ChatLogprobs | None = None
        self._token_ids: list[int] = []
        self._finish_reason = ""
        self._stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Take in one delta."""
        self._message.add(self._reader.take(delta))
        self._token_ids += delta.token_ids
        new = chat_logprobs(delta.logprobs, self._top)
        if new is not None and self._logprobs is not None:
            self._logprobs.content += new.content
        elif new is not None:
            self._logprobs = new
        self._finish_reason = self._reader.finish_reason(delta) or ""
        self._stop_reason = delta.stop_reason

    def finish(self, index: int, with_token_ids: bool) -> ChatChoice:
        """Return the choice after its last delta."""
        return ChatChoice(
            index=index,
            message=self._message.message(),
            logprobs=self._logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            token_ids=self._token_ids if with_token_ids else UNSET,
        )
