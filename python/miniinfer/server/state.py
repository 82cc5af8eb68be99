"""What all handlers share: the engine (or its absence), settings, and the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from miniinfer.bursts import Burst

from .admission import RequestQueue
from .config import ServerConfig
from .engine_api import Engine
from .errors import ApiError, shutting_down, unavailable
from .metrics import Metrics
from .parsers import Parsers, choose_parsers
from .record import current_record
from .tracing import Tracing

_TOKENIZER_THREADS = 2


class ServerState:
    """Shared state of one application; used on the event loop's thread only."""

    def __init__(
        self,
        engine: asyncio.Future[Engine],
        config: ServerConfig,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.tracing = tracing
        self.metrics = Metrics()
        self.queue = RequestQueue(config)
        self.burst = Burst()
        self.executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self.draining = False
        self.aborting = False
        self._engine = engine
        self._parsers: Parsers | None = None
        self._active: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()

    @property
    def status(self) -> str:
        """One of loading, failed, dead, draining and ok."""
        engine = self.loaded_engine
        if engine is None:
            return "failed" if self._engine.done() else "loading"
        if not engine.is_healthy:
            return "dead"
        return "draining" if self.draining else "ok"

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine, dead or alive, once it is loaded."""
        if not self._engine.done() or self._engine.cancelled() or self._engine.exception():
            return None
        return self._engine.result()

    @property
    def readiness(self) -> str:
        """The status, or overloaded while requests without a key of their own are refused."""
        if self.status == "ok" and (self._too_many() or self.queue.refusal()):
            return "overloaded"
        return self.status

    @property
    def num_active(self) -> int:
        """Generating requests in flight."""
        return len(self._active)

    def engine(self) -> Engine:
        """Return the loaded engine; raises `ApiError` 503 while there is none."""
        engine = self.loaded_engine
        if engine is not None:
            return engine
        if self._engine.done():
            raise unavailable("the model failed to load", "engine_failed", retry=False)
        raise unavailable("the model is still loading", "loading")

    def check_accepting(self) -> Engine:
        """Return an engine that may be given new work; raises `ApiError` 503 or 429 otherwise.

        Nothing of a request but its key has been looked at so far, so a refusal is cheap.
        """
        engine = self.engine()
        refusal = self._refusal(engine)
        if refusal is not None:
            self.metrics.reject(refusal.code or "")
            raise refusal
        return engine

    def _refusal(self, engine: Engine) -> ApiError | None:
        if not engine.is_healthy:
            message = engine.error or "the engine is dead"
            return unavailable(message, "engine_dead", retry=False)
        if self.draining:
            return shutting_down()
        if self._too_many():
            return unavailable(
                f"the server takes {self.config.max_concurrent_requests} requests at once "
                f"(max_concurrent_requests), and {self.num_active} are in flight",
                "overloaded",
            )
        return self.queue.refusal(current_record().tenant)

    def _too_many(self) -> bool:
        limit = self.config.max_concurrent_requests
        return limit is not None and self.num_active >= limit

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Count the running task as a request in flight, and as queued until its first token."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._active.add(task)
        self._idle.clear()
        self._busy.set()
        record = current_record()
        record.ticket = ticket = self.queue.enter(record.tenant)
        try:
            yield
        finally:
            ticket.close()
            self._active.discard(task)
            if not self._active:
                self._idle.set()
                self._busy.clear()

    async def wait_busy(self) -> None:
        """Wait until a request is in flight."""
        await self._busy.wait()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is in flight; False if `timeout` seconds pass first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """End every request in flight with an error, for a shutdown that has waited enough."""
        self.aborting = True
        for task in list(self._active):
            task.cancel()

    def aborted(self) -> ApiError | None:
        """Return the error of a request that `abort_all` has just cancelled.

        None means that the cancellation is the client's, who has gone.
        """
        task = asyncio.current_task()
        if not self.aborting or task is None:
            return None
        task.uncancel()
        return shutting_down()

    def parsers(self) -> Parsers:
        """Return the formats of the model's answers; raises `ApiError` 503 without a model."""
        if self._parsers is None:
            self._parsers = choose_parsers(self.config, self.engine().tokenizer)
        return self._parsers

    def served_names(self) -> tuple[str, ...]:
        """Return the model names that requests may use, the main one first."""
        return self.config.served_model_names or (self.engine().model_name,)

    def check_model(self, model: str | None) -> str:
        """Return the name to answer with; raises `ApiError` 404 for an unknown model."""
        names = self.served_names()
        if model is None:
            return names[0]
        if model not in names:
            raise ApiError(
                404,
                f"the model {model!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return model


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
