"""Generation in an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

from ._core import Delta, Submission
from .config import EngineArgs
from .engine import Engine
from .errors import EngineDeadError
from .outputs import RequestOutput, RequestState
from .parameters import ParameterError
from .parsing import ParserSpec
from .prompts import Prompt, encode_prompt
from .safe_logging import safe_logger
from .sampling_params import SamplingParams
from .structured import CompiledGrammar, StructuredOutputsParams
from .watchdog import Watchdog

__all__ = ["AsyncLLM", "Stream"]

logger = safe_logger(__name__)

_MAILBOX = 2
"""Deltas that wait in Python before the core is asked to keep, and merge, what follows."""

_LAST_WORDS_SECONDS = 10.0
"""How long the text thread may take to tell readers that the engine was closed."""

_LOOK_UP_SECONDS = 1.0
"""How often whoever waits for the last step looks whether it hangs."""

_LAST_STEP_SECONDS = 30.0
"""How long the interpreter's exit waits for the step that is being computed."""

_alive: weakref.WeakSet[AsyncLLM] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop the engines that were not closed.

    A thread that comes back from native code to an interpreter that has gone is unwound there and
    then, which torch answers by ending the process with SIGABRT.
    """
    engines = [engine for engine in _alive if engine._thread.is_alive() and not engine._hung]
    for engine in engines:
        engine._request_stop()
    for engine in engines:
        engine._thread.join(_LAST_STEP_SECONDS)


class _Mailbox:
    """What the loop's callback leaves for one request's reader."""

    __slots__ = ("deltas", "held", "running", "submission", "waiter")

    def __init__(self, submission: Submission, n: int) -> None:
        self.submission = submission
        self.running = n
        self.deltas: deque[Delta] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.held = False

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.running -= 1
        elif len(self.deltas) > _MAILBOX and not self.held:
            self.held = True
            self.submission.hold()
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

    def __init__(self, owner: AsyncLLM, request_id: str, mailbox: _Mailbox) -> None:
        self.request_id = request_id
        self._owner = owner
        self._mailbox = mailbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next delta, of whichever choice has one."""
        mailbox = self._mailbox
        if mailbox.waiter is not None:
            raise RuntimeError(f"request {self.request_id} has another reader that waits")
        while not mailbox.deltas:
            if mailbox.running == 0:
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            # A stream may outlive the loop that it was submitted in.
            self._owner._attach(loop)
            mailbox.waiter = loop.create_future()
            try:
                await mailbox.waiter
            finally:
                mailbox.waiter = None
        return mailbox.take()

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


class AsyncLLM:
    """A model to generate with in an event loop. The engine steps on a thread of its own.

        async with AsyncLLM(EngineArgs()) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.text)

    All methods are for the thread of the event loop, except `stats` and `compile_structured`.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.engine = Engine(args, text_thread=True)
        self.tokenizer = self.engine.tokenizer
        self.model_name = self.engine.model_name
        self.max_model_len = self.engine.max_model_len
        self.default_sampling_params = self.engine.default_sampling_params()
        self._core = self.engine.core
        self._by_choice: dict[int, _Mailbox] = {}
        self._ids: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self._stopping = False
        self._hung = False
        self._watchdog = None
        if args.step_timeout is not None:
            self._watchdog = Watchdog(args.step_timeout, self._give_up)
        self._thread = threading.Thread(target=self._run, name="miniinfer-engine", daemon=True)
        self._thread.start()
        _alive.add(self)

    @classmethod
    def from_args(cls, args: EngineArgs) -> AsyncLLM:
        """Load the model that `args` name. Takes seconds: call it from a thread."""
        return cls(args)

    from_engine_args = from_args

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def is_healthy(self) -> bool:
        """False once the engine has died or was closed."""
        return self._error is None and self._thread.is_alive()

    @property
    def error(self) -> str | None:
        """Why the engine died."""
        return self._error

    def _run(self) -> None:
        """The engine thread: step while there is work, sleep while there is none."""
        engine, core, watchdog = self.engine, self._core, self._watchdog
        try:
            while not self._stopping and self._error is None:
                if watchdog is not None:
                    watchdog.begin()
                if not engine.step():
                    if watchdog is not None:
                        watchdog.rest()
                    core.wait()
        except BaseException as error:
            # A step that comes back after it was given up finds that it is no longer planned.
            if self._error is None:
                self._error = f"{type(error).__name__}: {error}"
                logger.critical("the engine has stopped", exc_info=error)
        finally:
            self._hung = False
            if watchdog is not None:
                watchdog.close()
            core.fail(self._error or "it was closed")

    def _give_up(self) -> None:
        """Tell everyone that a step hangs, from the watchdog's thread."""
        self._hung = True
        self._error = (
            f"a step has taken more than {self.engine.args.step_timeout:g} s (step_timeout) "
            "and is taken for hung"
        )
        logger.critical("the engine has stopped: %s", self._error)
        self._core.fail(self._error)

    def compile_structured(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the form of answers, for `SamplingParams.structured_outputs`. From any thread.

        `submit` compiles what is not compiled, in the thread of the event loop: call this in
        another one first. Raises `ParameterError` for a form that cannot be used.
        """
        return self.engine.compile_grammar(params)

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
            raise EngineDeadError(f"the engine has stopped: {self._error or 'it was closed'}")
        submission = self.engine.submit(
            prompt_token_ids,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parser=parser,
        )
        first, n = submission.ids()
        mailbox = _Mailbox(submission, n)
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
        loop.add_reader(self._core.wake_fd(), self._on_wake)
        self._loop = loop

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._core.wake_fd())
        self._loop = None

    def _on_wake(self) -> None:
        """Hand out all deltas that are ready: once per step, whatever the number of requests."""
        self._core.clear_wake()
        for choice, delta in self._core.drain():
            mailbox = self._by_choice.get(choice)
            if mailbox is not None:
                mailbox.put(delta)

    def _forget(self, request_id: str, submission: Submission) -> None:
        self._ids.discard(request_id)
        first, n = submission.ids()
        for choice in range(first, first + n):
            self._by_choice.pop(choice, None)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the core, by name, as of its last step."""
        kv_cache_tokens = self.engine.num_kv_blocks * self.engine.args.block_size
        return {**self._core.stats(), "kv_cache_tokens": kv_cache_tokens}

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes before the next step."""
        self._core.reset_prefix_cache()
        return True

    def _request_stop(self) -> None:
        self._stopping = True
        self._core.interrupt()

    async def close(self) -> None:
        """End every request and stop the engine's thread."""
        self._request_stop()
        while self._thread.is_alive() and not self._hung:
            await asyncio.to_thread(self._thread.join, _LOOK_UP_SECONDS)
        self._detach()
        # What the engine had to say at its end is for the readers that still wait; the text thread
        # may not have passed it on yet.
        for mailbox in set(self._by_choice.values()):
            mailbox.release()
        while any(mailbox.running for mailbox in self._by_choice.values()):
            if not await asyncio.to_thread(self._core.wait_output, _LAST_WORDS_SECONDS):
                logger.error("the text thread does not answer; its readers are left without an end")
                return
            self._on_wake()
