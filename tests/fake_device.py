"""A device for tests: a thread that does what is queued later than it was asked."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from miniinfer.step import StepBuffers


class ThreadQueue:
    """A `DeviceQueue` with the order of a stream.

    Work waits until the host has gone on or waits. Between a `fetch` and its wait the host's copy
    of the samples holds a token that no vocabulary has: whoever reads it too early fails.
    """

    UNREAD = 2**30

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.in_flight = 0
        self.most_in_flight = 0
        self.waits = 0
        self._thread = threading.Thread(target=self._loop, name="fake device", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            # Long enough for a host that does not wait to run ahead.
            time.sleep(1e-4)
            with torch.inference_mode():
                work()

    def upload(self, make: Callable[[], Any]) -> Any:
        return make()

    def run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is None:
                try:
                    work()
                except BaseException as error:
                    self._error = error

        self._work.put(guarded)

    def fetch(self, copy: Callable[[], None]) -> Callable[[], None]:
        done = threading.Event()
        errors: list[BaseException] = []

        def last() -> None:
            error, self._error = self._error, None
            try:
                if error is not None:
                    raise error
                copy()
            except BaseException as error:
                errors.append(error)
            done.set()

        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._work.put(last)

        def wait() -> None:
            if not done.wait(30):
                raise TimeoutError("the fake device does not answer")
            self.in_flight -= 1
            self.waits += 1
            if errors:
                raise errors[0]

        return wait

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(30)


def make_asynchronous(llm: Any) -> ThreadQueue:
    """Put a fake device under an engine, and poison what it has not yet fetched."""
    runner = llm.engine.runner
    runner.queue = device = ThreadQueue()
    launch = runner.launch

    def poisoned(buffers: StepBuffers, before: Any = None) -> Any:
        sampled: np.ndarray[Any, Any] = buffers._host["sampled"]
        sampled[:] = ThreadQueue.UNREAD
        return launch(buffers, before)

    runner.launch = poisoned
    return device
