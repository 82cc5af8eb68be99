"""Where the terminal commands get their text from: an engine in this process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from miniinfer.config import EngineArgs
    from miniinfer.server.engine_api import Delta, Engine

_END = object()


class Backend(Protocol):
    """Answers conversations piece by piece; closing an iterator ends the request."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of what it holds."""

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Generator[str]:
        """Yield the answer to a conversation."""


class LocalBackend:
    """An engine in this process, with an event loop of its own in a thread.

    The main thread stays free to wait for the terminal and to take Ctrl-C.
    """

    def __init__(self, args: EngineArgs, chat_template: str | None = None) -> None:
        from miniinfer import AsyncLLM

        self._engine: Engine = AsyncLLM.from_args(args)
        self._chat_template = chat_template
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-io")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Generator[str]:
        """Yield the answer to a conversation."""
        tokenizer = self._engine.tokenizer
        prompt = tokenizer.apply_chat_template(messages, chat_template=self._chat_template)
        ids = tokenizer.encode_rendered(prompt)
        return self._generate(ids, options)

    def complete(self, prompt: str, options: dict[str, Any]) -> Generator[str]:
        """Yield the continuation of a text."""
        return self._generate(self._engine.tokenizer.encode(prompt), options)

    def _generate(self, token_ids: list[int], options: dict[str, Any]) -> Generator[str]:
        from miniinfer.sampling_params import RequestOutputKind, SamplingParams

        limit = self._engine.max_model_len
        left = limit - len(token_ids)
        if left < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, and the model's context is {limit}"
            )
        known = {name for name in SamplingParams.__struct_fields__ if name != "max_tokens"}
        defaults = self._engine.default_sampling_params
        fields = {name: value for name, value in defaults.items() if name in known} | options
        fields["max_tokens"] = min(fields.get("max_tokens") or left, left)
        params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        deltas: queue.SimpleQueue[Any] = queue.SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(self._pump(token_ids, params, deltas), self._loop)
        try:
            while (item := _next(deltas)) is not _END:
                if isinstance(item, Exception):
                    raise item
                yield _text(item)
        finally:
            task.cancel()

    async def _close(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._engine.close()

    async def _pump(
        self, token_ids: list[int], params: Any, deltas: queue.SimpleQueue[Any]
    ) -> None:
        try:
            stream = self._engine.submit(token_ids, params)
            try:
                async for delta in stream:
                    deltas.put(delta)
            finally:
                stream.close()
        except Exception as error:
            deltas.put(error)
        finally:
            deltas.put(_END)


def _next(deltas: queue.SimpleQueue[Any]) -> Any:
    """The next item. Looks up at times: a signal that comes just before a wait does not end it."""
    while True:
        try:
            return deltas.get(timeout=0.2)
        except queue.Empty:
            continue


def _text(delta: Delta) -> str:
    if delta.finish_reason in ("error", "abort"):
        raise RuntimeError(delta.error or "the engine ended the request")
    return delta.text
