"""All the engine streams of one HTTP request, merged into one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from miniinfer.bursts import Lane
from miniinfer.parsing import ParserSpec
from miniinfer.sampling_params import SamplingParams

from .config import MAX_CHOICES
from .engine_api import Delta, Engine, Stream
from .errors import ApiError, engine_failure, from_value_error, internal, invalid, unavailable
from .metrics import Metrics
from .record import current_record
from .responses import PromptTokensDetails, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One prompt with its parameters."""

    token_ids: list[int]
    params: SamplingParams
    parser: ParserSpec | None = None
    form_param: str = "structured_outputs"
    """What the request calls the form of its answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who asks: what the engine is told of a request besides its work."""

    request_id: str
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None


class DeltaSource(Protocol):
    """The deltas of a request: a `Generation`, or an echo that generates nothing."""

    num_choices: int

    async def __aenter__(self) -> Self:
        """Submit the request."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what still runs."""

    def __aiter__(self) -> Self:
        """Return itself."""

    async def __anext__(self) -> tuple[int, Delta]:
        """Wait for the next delta and its choice."""

    async def forward(self, take: Callable[[int, Delta], bool]) -> bool:
        """Call `take` with each choice and delta as they come, until the last of all.

        Return True where `take` has returned False before that: it wants no more for now.
        """
        async for index, delta in self:
            if not take(index, delta):
                return True
        return False

    def lane(self) -> Lane | None:
        """Return the way past the event loop, for a stream that is forwarded; None without one."""
        return None

    def usage(self) -> Usage:
        """Return the tokens so far."""


class Generation(DeltaSource):
    """Submits the prompts of a request and iterates over (choice index, delta).

    Choice i of prompt p with n choices each has the index p * n + i. Entering submits, leaving
    cancels whatever still runs, so a request never outlives its handler. Iteration ends when
    every choice has finished with stop or length; anything else raises `ApiError`.
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, work: Sequence[Work], origin: Origin
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._work = work
        self._origin = origin
        self.choices_per_prompt = work[0].params.n
        self.num_choices = count_choices(work)
        self._streams: list[Stream] = []
        self._queue: asyncio.Queue[tuple[int, Delta | Exception]] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._output_tokens = [0] * self.num_choices
        self._cached_tokens = [0] * len(work)
        self._unfinished = set(range(self.num_choices))
        self._lane: Lane | None = None
        self._record = current_record()
        self._ticket = self._record.ticket

    async def __aenter__(self) -> Self:
        try:
            self._submit_all()
        except BaseException:
            self._close_streams()
            raise
        if len(self._streams) > 1:
            self._queue = asyncio.Queue(len(self._streams))
            self._pumps = [
                asyncio.create_task(self._pump(position, stream))
                for position, stream in enumerate(self._streams)
            ]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._record.num_prompt_tokens = sum(len(work.token_ids) for work in self._work)
        self._record.num_cached_tokens = sum(self._cached_tokens)
        if self._lane is not None:
            # Of a stream that was left, the last tokens may have passed by.
            passed = self._lane.num_output_tokens()
            self._output_tokens[0] = max(self._output_tokens[0], passed)
        self._record.num_output_tokens = sum(self._output_tokens)
        if isinstance(exc, ApiError):
            self._record.error_code = exc.code
        self._close_streams()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._unfinished:
            raise StopAsyncIteration
        with self._failures():
            position, delta = await self._next_delta_in_time()
        return self._account(position, delta), delta

    async def forward(self, take: Callable[[int, Delta], bool]) -> bool:
        """As `DeltaSource.forward`; one prompt's deltas pass through no task."""
        if self._queue is not None or self._record.first_token is None:
            # Until there is a token there is a deadline.
            return await super().forward(take)
        more, broken = True, None

        def account(delta: Delta) -> bool:
            nonlocal more, broken
            index = self._account(0, delta)
            try:
                more = take(index, delta)
            except Exception as error:
                more, broken = False, error
            return more

        with self._failures():
            await self._streams[0].forward(account)
            if more and self._unfinished:
                raise StopAsyncIteration
        if broken is not None:
            raise broken
        return bool(self._unfinished)

    def lane(self) -> Lane | None:
        """As `DeltaSource.lane`: there is one for one choice of one prompt."""
        if self._lane is None and self.num_choices == 1:
            self._lane = self._streams[0].lane()
        return self._lane

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what a stream raises into what the client is told."""
        try:
            yield
        except StopAsyncIteration:
            raise internal("the engine ended the request without a result") from None
        except ApiError:
            raise
        except Exception as error:
            # A dead engine answers for every request; anything else is a defect to be logged.
            if self._engine.is_healthy:
                raise
            raise engine_failure(self._engine, str(error)) from error

    def usage(self) -> Usage:
        """Return the tokens so far; a prompt counts once, however many choices it has."""
        return count_usage(self._work, sum(self._output_tokens), sum(self._cached_tokens))

    def _submit_all(self) -> None:
        for position, work in enumerate(self._work):
            request_id = self._origin.request_id
            if len(self._work) > 1:
                request_id = f"{request_id}-{position}"
            try:
                stream = self._engine.submit(
                    work.token_ids,
                    work.params,
                    request_id=request_id,
                    priority=self._origin.priority,
                    tenant=self._origin.tenant,
                    cache_salt=self._origin.cache_salt,
                    parser=work.parser,
                )
            except ValueError as error:
                raise from_value_error(error) from error
            except Exception as error:
                if self._engine.is_healthy:
                    raise
                raise engine_failure(self._engine, str(error)) from error
            self._streams.append(stream)
            if self._ticket is not None:
                self._ticket.submitted(position, len(work.token_ids))
        self._record.submitted = time.monotonic()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    async def _next_delta_in_time(self) -> tuple[int, Delta]:
        """Wait for a delta; for the first one no longer than the queue's limit allows."""
        deadline = None if self._ticket is None else self._ticket.deadline
        if deadline is None or self._record.first_token is not None:
            return await self._next_delta()
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await self._next_delta()
        except TimeoutError:
            if not limit.expired():
                raise
            self._metrics.reject("queue_timeout")
            waited = time.monotonic() - self._record.started
            raise unavailable(
                f"the request has waited {waited:.1f} s without a first token, which is the most "
                "it may (--max-queue-time)",
                "queue_timeout",
            ) from None

    async def _next_delta(self) -> tuple[int, Delta]:
        if self._queue is None:
            return 0, await self._streams[0].__anext__()
        position, item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return position, item

    async def _pump(self, position: int, stream: Stream) -> None:
        """Move one stream's deltas into the queue, whose bound passes back-pressure on."""
        assert self._queue is not None, "pumps run only beside a queue"
        remaining = self.choices_per_prompt
        try:
            while remaining:
                delta = await stream.__anext__()
                remaining -= delta.finish_reason is not None
                await self._queue.put((position, delta))
        except Exception as error:
            await self._queue.put((position, error))

    def _account(self, position: int, delta: Delta) -> int:
        """Count a delta; return the index of its choice."""
        index = position * self.choices_per_prompt + delta.index
        self._output_tokens[index] = delta.num_output_tokens
        if self._record.first_token is None:
            self._record.first_token = time.monotonic()
        if self._ticket is not None:
            self._ticket.answered(position)
        self._cached_tokens[position] = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self._end(index, delta)
        return index

    def _end(self, index: int, delta: Delta) -> None:
        """Note that a choice is over; raises `ApiError` unless that is with stop or length."""
        self._record.finish_reason = delta.finish_reason
        if delta.finish_reason == "error":
            form_param = self._work[index // self.choices_per_prompt].form_param
            raise engine_failure(self._engine, delta.error, form_param)
        if delta.finish_reason == "abort":
            raise unavailable("the engine aborted the request", "aborted")
        self._unfinished.discard(index)
        if not self._unfinished:
            params = self._work[0].params
            self._metrics.observe_request(
                [len(work.token_ids) for work in self._work],
                self._output_tokens,
                n=params.n,
                max_tokens=params.max_tokens,
            )


def count_choices(work: Sequence[Work]) -> int:
    """Return the choices of a request; raises `ApiError` 400 for too many."""
    choices = sum(item.params.n for item in work)
    if choices > MAX_CHOICES:
        raise invalid("n", f"a request may ask for {MAX_CHOICES} choices, got {choices}")
    return choices


def count_usage(work: Sequence[Work], output_tokens: int, cached_tokens: int) -> Usage:
    """Return the usage of a request; a prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(item.token_ids) for item in work)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
