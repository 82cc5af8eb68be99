"""Streams of deltas in an event loop, whatever engine they come from."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Self

from ._core import Delta, Lane, Submission
from .errors import EngineDeadError
from .outputs import RequestOutput, RequestState
from .parameters import ParameterError
from .parsing import ParserSpec
from .prompts import Prompt, encode_prompt
from .sampling_params import SamplingParams
from .structured import CompiledGrammar, StructuredOutputsParams
from .tokenizer import Tokenizer

__all__ = ["Stream", "StreamingLLM"]

_MAILBOX = 2
"""Deltas that wait in Python before the core is asked to keep, and merge, what follows."""


class Mailbox:
    """What the loop's callback leaves for one request's reader."""

    __slots__ = ("deltas", "held", "running", "submission", "taker", "waiter")

    def __init__(self, submission: Submission, n: int) -> None:
        self.submission = submission
        self.running = n
        self.deltas: deque[Delta] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.taker: Callable[[Delta], bool] | None = None
        self.held = False

    def put(self, delta: Delta) -> None:
        ended = delta.finish_reason is not None
        self.running -= ended
        if self.taker is not None:
            self._pass_on(self.taker, delta)
            return
        self.deltas.append(delta)
        if not ended and len(self.deltas) > _MAILBOX and not self.held:
            self.held = True
            self.submission.hold()
        self.notify()

    def _pass_on(self, taker: Callable[[Delta], bool], delta: Delta) -> None:
        try:
            if taker(delta) and self.running:
                return
        except BaseException as error:
            # It is the reader's, and must not keep the others from their deltas.
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_exception(error)
        self.taker = None
        self.notify()

    def release(self) -> None:
        """Keep nothing back in the core from now on: it is about to end."""
        self.held = True
        self.submission.resume()

    def take(self) -> Delta:
        delta = self.deltas.popleft()
        if self.held and not self.deltas:
            self.held = False
            self.submission.resume()
        return delta

    def notify(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Stream:
    """The deltas of one request, as an async iterator; closing or dropping it cancels."""

    def __init__(self, owner: StreamingLLM, request_id: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self._owner = owner
        self._mailbox = mailbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next delta, of whichever choice has one."""
        mailbox = self._mailbox
        self._check_alone()
        while not mailbox.deltas:
            if mailbox.running == 0:
                raise StopAsyncIteration
            await self._wait()
        return mailbox.take()

    async def forward(self, take: Callable[[Delta], bool]) -> None:
        """Give `take` each delta as it comes, until the last, or until it returns False.

        It is called by whoever brings the delta, in the event loop: no task has to wake up for a
        token. It must be quick; what it raises is raised here.
        """
        mailbox = self._mailbox
        self._check_alone()
        while mailbox.deltas:
            if not take(mailbox.take()):
                return
        if mailbox.running == 0:
            return
        mailbox.taker = take
        try:
            await self._wait()
        finally:
            mailbox.taker = None

    def lane(self) -> Lane | None:
        """The way past the event loop, for a request of one choice whose reader uses `forward`."""
        return self._mailbox.submission.lane()

    def _check_alone(self) -> None:
        if self._mailbox.waiter is not None:
            raise RuntimeError(f"request {self.request_id} has another reader that waits")

    async def _wait(self) -> None:
        """Wait until the mailbox notifies."""
        mailbox = self._mailbox
        loop = asyncio.get_running_loop()
        # A stream may outlive the loop that it was submitted in.
        self._owner._attach(loop)
        mailbox.waiter = loop.create_future()
        try:
            await mailbox.waiter
        finally:
            mailbox.waiter = None

    def cancel(self) -> None:
        """End the request; what it has generated, and its end, are still delivered."""
        self._mailbox.submission.cancel()

    def close(self) -> None:
        """End the request and deliver nothing more."""
        mailbox = self._mailbox
        self._owner._forget(self.request_id, mailbox.submission)
        mailbox.submission.close()
        mailbox.running = 0
        mailbox.deltas.clear()
        mailbox.notify()

    async def aclose(self) -> None:
        """Close it, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()


class StreamingLLM(abc.ABC):
    """A model to generate with in an event loop, wherever its engine runs.

    All methods are for the thread of the event loop, except `stats` and `compile_structured`.
    """

    tokenizer: Tokenizer
    model_name: str
    max_model_len: int
    default_sampling_params: dict[str, Any]

    def __init__(self) -> None:
        self._by_choice: dict[int, Mailbox] = {}
        self._ids: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    @abc.abstractmethod
    def is_healthy(self) -> bool:
        """False once the engine has died or was closed."""

    @property
    @abc.abstractmethod
    def error(self) -> str | None:
        """Why the engine died."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the core, by name."""

    @abc.abstractmethod
    def compile_structured(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the form of answers, for `SamplingParams.structured_outputs`."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes before the next step."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End every request and stop the engine."""

    @abc.abstractmethod
    def _submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int,
        tenant: str,
        cache_salt: str | None,
        parser: ParserSpec | None,
    ) -> Submission:
        """Queue a request in the core."""

    @abc.abstractmethod
    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop call when there are outputs."""

    @abc.abstractmethod
    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End that."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        parser: ParserSpec | None = None,
    ) -> Stream:
        """Queue a request and return its stream at once; `parser` fills `Delta.parts`.

        Raises `RequestError` if it can never run, `ParameterError` if `request_id` is in use, and
        `EngineDeadError` if the engine has stopped.
        """
        self._attach(asyncio.get_running_loop())
        if request_id is None:
            request_id = uuid.uuid4().hex
        if request_id in self._ids:
            raise ParameterError("request_id", f"request id {request_id!r} is already in use")
        if not self.is_healthy:
            raise EngineDeadError(f"the engine has stopped: {self.error or 'it was closed'}")
        submission = self._submit(
            prompt_token_ids,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parser=parser,
        )
        first, n = submission.ids()
        mailbox = Mailbox(submission, n)
        self._by_choice.update(dict.fromkeys(range(first, first + n), mailbox))
        self._ids.add(request_id)
        return Stream(self, request_id, mailbox)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield outputs as they come, as `output_kind` says.

        Closing the iterator, or cancelling the task that runs it, cancels the request.
        """
        params = sampling_params or SamplingParams(**self.default_sampling_params)
        text, token_ids = encode_prompt(prompt, self.tokenizer)
        stream = self.submit(
            token_ids,
            params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        with contextlib.closing(stream):
            state = RequestState(
                stream.request_id,
                text,
                token_ids,
                params.n,
                params.output_kind,
                params.logprobs is not None,
            )
            async for delta in stream:
                state.add(delta)
                output = state.take_output()
                if output is not None:
                    yield output

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch for outputs in this loop."""
        if self._loop is loop:
            return
        self._detach()
        self._watch(loop)
        self._loop = loop

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._unwatch(self._loop)
        self._loop = None

    def _deliver(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """Hand out all deltas that are ready: once per step, whatever the number of requests."""
        for choice, delta in deltas:
            mailbox = self._by_choice.get(choice)
            if mailbox is not None:
                mailbox.put(delta)

    def _forget(self, request_id: str, submission: Submission) -> None:
        self._ids.discard(request_id)
        first, n = submission.ids()
        for choice in range(first, first + n):
            self._by_choice.pop(choice, None)
