"""Generation in an event loop."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from typing import Any

from ._core import Submission
from .config import EngineArgs
from .engine import Engine
from .parsing import ParserSpec
from .safe_logging import safe_logger
from .sampling_params import SamplingParams
from .streams import StreamingLLM
from .structured import CompiledGrammar, StructuredOutputsParams
from .watchdog import Watchdog, taken_for_hung

__all__ = ["AsyncLLM"]

logger = safe_logger(__name__)

_LAST_WORDS_SECONDS = 10.0
"""How long the text thread may take to tell readers that the engine was closed."""

_LOOK_UP_SECONDS = 1.0
"""How often whoever waits for the last step looks whether it hangs."""

_GIVEN_UP_SECONDS = 15.0
"""How long closing waits for the step of an engine that has lost one of its processes: what it
computes together with that one fails soon, but need not."""

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


class AsyncLLM(StreamingLLM):
    """A model to generate with in an event loop. The engine steps on a thread of its own.

        async with AsyncLLM(EngineArgs()) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.text)

    All methods are for the thread of the event loop, except `stats` and `compile_structured`.
    """

    def __init__(self, args: EngineArgs) -> None:
        super().__init__()
        self.engine = Engine(args, text_thread=True)
        self.tokenizer = self.engine.tokenizer
        self.model_name = self.engine.model_name
        self.max_model_len = self.engine.max_model_len
        self.default_sampling_params = self.engine.default_sampling_params()
        self._core = self.engine.core
        self._error: str | None = None
        self._stopping = False
        self._hung = False
        self._watchdog = None
        if args.step_timeout is not None:
            self._watchdog = Watchdog(args.step_timeout, self._give_up_step)
        self._thread = threading.Thread(target=self._run, name="miniinfer-engine", daemon=True)
        self._thread.start()
        _alive.add(self)
        if self.engine.leader is not None:
            self.engine.leader.tell(self._give_up)

    @classmethod
    def from_args(cls, args: EngineArgs) -> AsyncLLM:
        """Load the model that `args` name. Takes seconds: call it from a thread."""
        return cls(args)

    from_engine_args = from_args

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
            engine.close()

    def _give_up_step(self) -> None:
        limit = self.engine.args.step_timeout
        assert limit is not None
        self._hung = True
        self._give_up(taken_for_hung(limit))

    def _give_up(self, reason: str) -> None:
        """Tell everyone that the engine is dead, from another thread than its own."""
        self._error = reason
        logger.critical("the engine has stopped: %s", reason)
        self._core.fail(reason)

    def compile_structured(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the form of answers, for `SamplingParams.structured_outputs`. From any thread.

        `submit` compiles what is not compiled, in the thread of the event loop: call this in
        another one first. Raises `ParameterError` for a form that cannot be used.
        """
        return self.engine.compile_grammar(params)

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
        return self.engine.submit(
            prompt_token_ids,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parser=parser,
        )

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._core.wake_fd(), self._on_wake)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._core.wake_fd())

    def _on_wake(self) -> None:
        self._core.clear_wake()
        self._deliver(self._core.drain())

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
        given_up = time.monotonic() + _GIVEN_UP_SECONDS
        while self._thread.is_alive() and not self._hung:
            if self._error is not None and time.monotonic() > given_up:
                break
            await asyncio.to_thread(self._thread.join, _LOOK_UP_SECONDS)
        # A step that hangs keeps its thread from doing so.
        await asyncio.to_thread(self.engine.close)
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
