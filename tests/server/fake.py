"""A scripted engine: yields the deltas a test lists and records what the server does to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miniinfer.chat_template import ChatTemplateError
from miniinfer.parsing import Part
from miniinfer.sampling_params import RequestOutputKind, SamplingParams, check_priority
from miniinfer.structured import StructuredOutputsParams

EOS = 257
VOCAB_SIZE = 300
CHAT_FRAME = 3
"""Tokens that the fake chat template adds to each message."""


@dataclass(frozen=True)
class FakeLogprob:
    token_id: int
    text: str
    bytes: bytes
    logprob: float
    rank: int = 1
    top: Sequence[tuple[int, str, bytes, float]] = ()


@dataclass
class FakeDelta:
    text: str = ""
    index: int = 0
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[FakeLogprob] | None = None
    prompt_logprobs: list[FakeLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Pause:
    """A step that waits for the test, or for ever."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()


Step = FakeDelta | Exception | Pause | float
Script = Callable[[list[int], SamplingParams], list[Step]]


class FakeTokenizer:
    """One token per UTF-8 byte; 256 is BOS, 257 EOS."""

    vocab_size = VOCAB_SIZE
    longest_token: int | None = None
    chat_template = "fake"
    special_ids = frozenset((256, EOS))

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def token_to_id(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 and token.isascii() else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * (self.adds_bos and add_special_tokens) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.chats.append((messages, options))
        if any("refuse" in str(message["content"]) for message in messages):
            raise ChatTemplateError("the template refuses this")
        text = "".join(str(message["content"] or "") for message in messages)
        return text + "\0" * (CHAT_FRAME * len(messages))

    def encode_rendered(self, prompt: str) -> list[int]:
        return list(prompt.encode())


class FakeStream:
    def __init__(self, engine: FakeEngine, request_id: str | None, steps: list[Step]) -> None:
        self.request_id = request_id
        self.cancelled = False
        self.finished = False
        self._engine = engine
        self._steps = iter(steps)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> FakeDelta:
        for step in self._steps:
            if isinstance(step, FakeDelta):
                return step
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Pause):
                step.reached.set()
                await step.go.wait()
            else:
                await asyncio.sleep(step)
        self.finished = True
        raise StopAsyncIteration

    async def forward(self, take: Callable[[FakeDelta], bool]) -> None:
        async for delta in self:
            if not take(delta):
                return

    def lane(self) -> None:
        return None

    def close(self) -> None:
        self.cancelled = True


@dataclass
class Submitted:
    token_ids: list[int]
    params: SamplingParams
    options: dict[str, Any]
    stream: FakeStream


class FakeEngine:
    """Satisfies `engine_api.Engine`; `script` says what each submitted request yields."""

    def __init__(self, script: Script | None = None, *, max_model_len: int = 64) -> None:
        self.script = script or (lambda ids, params: answer(params, ["Hel", "lo"]))
        self.tokenizer = FakeTokenizer()
        self.model_name = "fake-model"
        self.max_model_len = max_model_len
        self.default_sampling_params: dict[str, Any] = {}
        self.is_healthy = True
        self.error: str | None = None
        self.closed = False
        self.requests: list[Submitted] = []
        self.refuse: Exception | None = None
        self.compiled: list[StructuredOutputsParams] = []
        self.compile_error: Exception | None = None
        self.counters: dict[str, Any] = {"num_requests_running": 1, "finished_stop": 2}

    def submit(self, prompt_token_ids: list[int], params: SamplingParams, **options: Any) -> Any:
        if self.refuse is not None:
            raise self.refuse
        check_priority(options.get("priority", 0))
        ids = {request.options.get("request_id") for request in self.requests} - {None}
        assert options.get("request_id") not in ids, "the server reused a request id"
        stream = FakeStream(self, options.get("request_id"), self.script(prompt_token_ids, params))
        self.requests.append(Submitted(prompt_token_ids, params, options, stream))
        return stream

    def compile_structured(self, params: StructuredOutputsParams) -> object:
        assert threading.current_thread() is not threading.main_thread()
        if self.compile_error is not None:
            raise self.compile_error
        self.compiled.append(params)
        return params

    def die(self, message: str = "CUDA error") -> None:
        self.is_healthy = False
        self.error = message

    def stats(self) -> dict[str, Any]:
        return self.counters

    def reset_prefix_cache(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True


def answer(
    params: SamplingParams,
    pieces: Sequence[str],
    *,
    finish_reason: str = "stop",
    stop_reason: int | str | None = None,
    prompt: int = 5,
    cached: int = 0,
    logprobs: bool | None = None,
) -> list[Step]:
    """Return the script of a request that says `pieces` in each of its choices, in turn.

    As the engine does, a request for the final output alone gets one delta per choice.
    """
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        pieces = ["".join(pieces)]
    with_logprobs = params.logprobs is not None if logprobs is None else logprobs
    steps: list[Step] = []
    produced = 0
    for position, piece in enumerate(pieces):
        produced += len(piece)
        last = position == len(pieces) - 1
        steps += [
            FakeDelta(
                piece,
                index=index,
                token_ids=list(piece.encode()),
                logprobs=[logprob(c, params.logprobs or 0) for c in piece]
                if with_logprobs
                else None,
                finish_reason=finish_reason if last else None,
                stop_reason=stop_reason if last else None,
                num_prompt_tokens=prompt,
                num_cached_tokens=cached,
                num_output_tokens=produced,
            )
            for index in range(params.n)
        ]
    return steps


def spoken(
    params: SamplingParams, deltas: Sequence[Sequence[Part]], *, finish_reason: str = "stop"
) -> list[Step]:
    """Return the script of a parsed request whose choices all say these parts, delta by delta.

    Each delta has one token, an exclamation mark. As `answer`, it gives the final output at once
    where that is what the request asks for.
    """
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        groups = [("!" * len(deltas), joined([part for delta in deltas for part in delta]))]
    else:
        groups = [("!", list(delta)) for delta in deltas]
    steps: list[Step] = []
    produced = 0
    for position, (tokens, parts) in enumerate(groups):
        produced += len(tokens)
        last = position == len(groups) - 1
        steps += [
            FakeDelta(
                "raw text",
                index=index,
                parts=parts,
                token_ids=list(tokens.encode()),
                logprobs=None if params.logprobs is None else [logprob(c, 0) for c in tokens],
                finish_reason=finish_reason if last else None,
                num_prompt_tokens=5,
                num_output_tokens=produced,
            )
            for index in range(params.n)
        ]
    return steps


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts as the core gives them: text that continues the part before joins it."""
    result: list[Any] = []
    for part in parts:
        if part[0] != "tool_call" and result and result[-1][:-1] == part[:-1]:
            result[-1] = (*part[:-1], result[-1][-1] + part[-1])
        else:
            result.append(part)
    return result


def logprob(character: str, top: int) -> FakeLogprob:
    raw = character.encode()
    best = [(raw[0] + i, chr(raw[0] + i), bytes([raw[0] + i]), -0.5 - i) for i in range(top)]
    return FakeLogprob(raw[0], character, raw, -0.5, 1, best)
