"""Generation in an event loop, with the engines in processes of their own.

This process never imports torch: it makes prompts, checks requests and turns ids into text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ._core import Submission
from .child import Child, exit_reason
from .config import EngineArgs
from .engine import load_tokenizer
from .engine_link import EngineLink
from .errors import EngineDeadError
from .parsing import ParserSpec
from .routing import Router
from .sampling_params import SamplingParams
from .socket_folder import SocketFolder
from .source import resolve_model
from .streams import StreamingLLM
from .structured import CompiledGrammar, StructuredOutputsParams
from .submission import SubmitParams, compile_grammar
from .tokenizer import Tokenizer

__all__ = ["Layout", "RemoteLLM", "add_up"]

logger = logging.getLogger(__name__)

ENGINE_MODULE = "miniinfer.engine_process"

_PATIENCE_SECONDS = 2.0
"""How long an engine's process may take to end when it is told to."""

_BACKOFF_SECONDS = (1.0, 30.0)
"""First and longest pause before an engine that died is started again."""

_GOOD_LIFE_SECONDS = 60.0
"""An engine that lived so long is started again after the first pause."""

_HANG_SECONDS = 30.0
"""An engine that owes tokens and is silent for so long is asked for a sign of life."""

_UNKNOWN_LENGTH = 256
"""Tokens that a request without `max_tokens` is taken to need when loads are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The sockets' folder, which client this is of all there ever were, and how many engines."""

    folder: Path
    client: int
    engines: int

    def number(self, engine: int) -> int:
        """The client's number for one of the engines, which has 16 bits.

        It is another for each engine: ids of requests carry it, and are unique here too.
        """
        return (self.client * self.engines + engine) % (2**16 - 2**16 % self.engines)


class RemoteLLM(StreamingLLM):
    """As `AsyncLLM`, with the engine in a process of its own, or with several.

        async with RemoteLLM(EngineArgs()) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.text)

    Args:
        args: The engine's settings.
        restart: Start an engine again that died or hangs.
        layout: Engines that others start and tell of this client. By default there is one, and it
            is started here.
        hang_timeout: Seconds of silence after which an engine that owes tokens is asked for a sign
            of life, and as many again after which it is given up. By default `step_timeout` if the
            settings have one, else 30.
        engine_module: What runs as the engine's process.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        restart: bool = False,
        layout: Layout | None = None,
        hang_timeout: float | None = None,
        engine_module: str = ENGINE_MODULE,
    ) -> None:
        super().__init__()
        self._args = args
        self._restart = restart
        self._hang_timeout = hang_timeout or args.step_timeout or _HANG_SECONDS
        self._engine_module = engine_module
        self._closing = threading.Event()
        self._child: Child | None = None
        self._own_folder: SocketFolder | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._timers: dict[EngineLink, asyncio.TimerHandle] = {}
        self._loads: dict[int, tuple[EngineLink, int]] = {}
        self._router = Router()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[EngineLink] = []
        try:
            self._start(layout)
        except BaseException:
            self._shut()
            raise

    @classmethod
    def from_args(cls, args: EngineArgs, **options: Any) -> RemoteLLM:
        """Start the engine for the model that `args` name and wait for it: call it from a thread.

        Raises `EngineDeadError` if it does not start.
        """
        return cls(args, **options)

    def _start(self, layout: Layout | None) -> None:
        source = resolve_model(self._args.model, self._args.revision)
        if layout is None:
            self._own_folder = SocketFolder()
            layout = Layout(self._own_folder.path, 0, 1)
            # The name stays that of what was asked for, wherever its files lie.
            name = self._args.served_model_name or source.name
            self._engine_args = dataclasses.replace(
                self._args, model=str(source.path), revision=None, served_model_name=name
            )
        owned = self._own_folder is not None
        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(load_tokenizer, self._args, source)
            self._links = [
                EngineLink(
                    self._context,
                    layout.folder,
                    layout.number(engine),
                    engine,
                    lambda: tokenizer.result().json(),
                    max_backlog=self._args.max_backlog,
                    stall_limit=self._args.stall_limit,
                    owned=owned,
                )
                for engine in range(layout.engines)
            ]
            self._announce()
            if owned:
                self._spawn(0.0)
            self.tokenizer: Tokenizer = tokenizer.result()
            self._submit_params = SubmitParams(self._args.seed, self.tokenizer)
            self._await_engines()
        hello = self._links[0].hello
        assert hello is not None, "the engine has introduced itself"
        self.model_name = hello.model_name
        self.max_model_len = int(hello.limits["max_model_len"])
        self.default_sampling_params = hello.default_sampling_params
        # With sizes of its own choice, another engine in its place might not fit.
        if owned:
            self._engine_args = dataclasses.replace(
                self._engine_args,
                max_model_len=self.max_model_len,
                num_kv_blocks=int(hello.limits["num_blocks"]),
            )

    def _announce(self) -> None:
        """The sockets are bound; for those who start the engines."""

    def _await_engines(self) -> None:
        for link in self._links:
            loading = link.error
            while link.error is not None:
                link.wait()
                link.look()
                if link.error not in (loading, None):
                    raise EngineDeadError(f"the engine did not start: {link.error}")

    def _spawn(self, backoff: float) -> None:
        """Start the engine's process."""
        assert self._own_folder is not None, "its sockets are ours"
        born = time.monotonic()

        def exited(code: int) -> None:
            if self._child is not None:
                self._child.leave()
            if self._closing.is_set():
                return
            link = self._links[0]
            healthy = link.hello is not None
            link.lose(exit_reason("the engine's process", code))
            if not (self._restart and healthy):
                return
            first, longest = _BACKOFF_SECONDS
            lived = time.monotonic() - born
            pause = first if lived > _GOOD_LIFE_SECONDS else min(max(first, 2 * backoff), longest)
            logger.error("the engine's process has ended; it starts again in %g s", pause)
            if not self._closing.wait(pause):
                self._spawn(pause)

        self._child = Child(self._engine_module, exited)
        self._child.tell(
            args=self._engine_args.as_dict(),
            engine=0,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        self._child.tell(client=0, folder=str(self._own_folder.path))
        if self._closing.is_set():
            # Closed while it was being started again.
            self._child.close(0.0)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine that was started here."""
        return None if self._child is None else self._child.pid

    @property
    def is_healthy(self) -> bool:
        """False while no engine takes requests. Asked in an event loop, it looks for itself."""
        if self._closing.is_set():
            return False
        with contextlib.suppress(RuntimeError):
            self._attach(asyncio.get_running_loop())
            for link in self._links:
                self._on_event(link)
        return any(link.is_ready for link in self._links)

    @property
    def error(self) -> str | None:
        """Why no engine takes requests."""
        if self._closing.is_set() or any(link.is_ready for link in self._links):
            return None
        return self._links[0].error

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
        link = self._choose(prompt_token_ids, cache_salt)
        assert link.frontend is not None, "the engine is ready"
        form = params.structured_outputs
        if isinstance(form, CompiledGrammar) and link is not self._links[0]:
            # A grammar belongs to the frontend that compiled it; this one has it too.
            form = compile_grammar(link.frontend, form)
            params = msgspec.structs.replace(params, structured_outputs=form)
        asked = self._submit_params.make(
            link.frontend,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parser=parser,
        )
        submission = link.frontend.submit(prompt_token_ids, asked)
        tokens = len(prompt_token_ids) + params.n * (params.max_tokens or _UNKNOWN_LENGTH)
        link.outstanding += tokens
        self._loads[submission.ids()[0]] = (link, tokens)
        self._watch_for_hangs(link)
        return submission

    def _choose(self, prompt: list[int], salt: str | None) -> EngineLink:
        if len(self._links) == 1:
            return self._links[0]
        loads = [float(link.outstanding) if link.is_ready else None for link in self._links]
        return self._links[self._router.choose(prompt, salt, loads)]

    def _forget(self, request_id: str, submission: Submission) -> None:
        super()._forget(request_id, submission)
        link, tokens = self._loads.pop(submission.ids()[0], (None, 0))
        if link is not None:
            link.outstanding -= tokens

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        for link in self._open_links():
            loop.add_reader(link.frames_fd(), self._on_frames, link)
            for descriptor in link.other_fds():
                loop.add_reader(descriptor, self._on_event, link)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for link in self._open_links():
            for descriptor in (link.frames_fd(), *link.other_fds()):
                loop.remove_reader(descriptor)
        for timer in self._timers.values():
            timer.cancel()

    def _open_links(self) -> list[EngineLink]:
        return [] if self._closing.is_set() else self._links

    def _on_event(self, link: EngineLink) -> None:
        """Look at everything: deltas, messages to send, an engine that came or went."""
        if self._closing.is_set():
            return
        was_ready = link.is_ready
        link.look()
        if was_ready and not link.is_ready:
            logger.error("the engine has stopped: %s", link.error)
            self._router.forget(self._links.index(link))
        self._on_frames(link)

    def _on_frames(self, link: EngineLink) -> None:
        """Take frames in, hand deltas out, send what there is to send: once a step."""
        more = link.take_frames()
        patience = link.make_text()
        self._deliver(link.drain())
        link.send()
        if self._loop is None:
            return
        if more:
            self._loop.call_soon(self._on_event, link)
        if patience is not None and link not in self._timers:
            self._timers[link] = self._loop.call_later(patience, self._on_patience, link)

    def _on_patience(self, link: EngineLink) -> None:
        del self._timers[link]
        self._on_event(link)

    def _watch_for_hangs(self, link: EngineLink) -> None:
        if self._watchdog is None and self._loop is not None:
            link.heard_at = time.monotonic()
            self._watchdog = self._loop.call_later(self._hang_timeout, self._look_for_hangs)

    def _look_for_hangs(self) -> None:
        """Only while somebody waits for tokens: an idle process is never woken."""
        self._watchdog = None
        waiting = {link for link, _ in self._loads.values() if link.is_ready}
        now = time.monotonic()
        for link in waiting:
            silence = now - link.heard_at
            if silence >= 2 * self._hang_timeout:
                link.lose(f"no sign of life for {silence:.0f} s (hang_timeout)")
                self._end_hung(link)
                self._on_event(link)
            elif silence >= self._hang_timeout:
                link.ask("ping", lambda error: None)
        if waiting and self._loop is not None:
            self._watchdog = self._loop.call_later(self._hang_timeout, self._look_for_hangs)

    def _end_hung(self, link: EngineLink) -> None:
        """Have a process ended that cannot end itself; for those who start engines."""
        if self._child is not None:
            self._child.kill()

    def compile_structured(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the form of answers, for `SamplingParams.structured_outputs`. From any thread.

        The engine's process compiles it once more when a request brings it. Raises
        `ParameterError` for a form that cannot be used.
        """
        frontends = [link.frontend for link in self._links if link.frontend is not None]
        # For all, so that none has to when a request comes; the first one's is handed out.
        compiled, *_ = [compile_grammar(frontend, params) for frontend in frontends]
        return compiled

    async def check(self) -> None:
        """Have the engines verify their whole state; raises `RuntimeError` with what is wrong."""
        loop = asyncio.get_running_loop()
        self._attach(loop)
        for link in self._links:
            answer: asyncio.Future[str | None] = loop.create_future()
            link.ask("check", answer.set_result)
            error = await answer
            if error is not None:
                raise RuntimeError(error)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engines together, by name: as of some 100 ms ago, or exact
        if they are idle.
        """
        found = [_stats_of(link) for link in self._links if link.frontend is not None]
        total = add_up(found)
        sizes = [link.hello.limits for link in self._links if link.hello is not None]
        total["kv_cache_tokens"] = sum(size["num_blocks"] * size["block_size"] for size in sizes)
        return total

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes before the next step."""
        for link in self._links:
            if link.frontend is not None:
                link.frontend.reset_prefix_cache()
        return True

    async def close(self) -> None:
        """End every request and stop the engine."""
        if self._closing.is_set():
            return
        self._detach()
        self._closing.set()
        self._timers.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
        for mailbox in set(self._by_choice.values()):
            mailbox.release()
        for link in self._links:
            link.fail("it was closed")
            self._deliver(link.drain())
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._closing.set()
        for link in self._links:
            link.close()
        self._context.term()
        if self._child is not None:
            self._child.close(_PATIENCE_SECONDS)
        if self._own_folder is not None:
            self._own_folder.remove()


def _stats_of(link: EngineLink) -> dict[str, Any]:
    """What an engine said last; one that is gone has no requests and no blocks any more."""
    assert link.frontend is not None
    stats = link.frontend.stats()
    if not link.is_ready:
        held = (name for name in stats if name.startswith(("num_requests_", "kv_blocks_")))
        stats |= dict.fromkeys(held, 0)
    return stats


def add_up(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Counters, gauges and histograms of several engines as those of one."""
    if len(stats) == 1:
        return stats[0]
    total: dict[str, Any] = {}
    for each in stats:
        for name, value in each.items():
            if isinstance(value, tuple):
                bounds, counts, seconds = value
                _, before, sum_before = total.get(name, (bounds, [0] * len(counts), 0.0))
                added = [old + new for old, new in zip(before, counts, strict=True)]
                total[name] = (bounds, added, sum_before + seconds)
            else:
                total[name] = total.get(name, 0) + value
    return total
