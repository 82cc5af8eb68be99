"""Notices that one thread's step does not come back, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Watchdog", "taken_for_hung"]


def taken_for_hung(limit: float) -> str:
    """Why an engine has stopped whose step took longer than `limit` seconds."""
    return f"a step has taken more than {limit:g} s (step_timeout) and is taken for hung"


class Watchdog:
    """Calls `bark`, once, when a step has taken longer than `limit` seconds.

    A step costs the watched thread one assignment. The watchdog sleeps until the running step
    could be late, and without a limit while there is none.
    """

    def __init__(self, limit: float, bark: Callable[[], None]) -> None:
        self._limit = limit
        self._bark = bark
        self._began: float | None = None
        self._awake = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="miniinfer-watchdog", daemon=True).start()

    def begin(self) -> None:
        """Note that a step begins; for the watched thread."""
        self._began = time.monotonic()
        if not self._awake.is_set():
            self._awake.set()

    def rest(self) -> None:
        """Note that there is no step until the next `begin`."""
        self._began = None
        self._awake.clear()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._began = None
        self._awake.set()

    def _watch(self) -> None:
        while True:
            self._awake.wait()
            if self._closed.is_set():
                return
            began = self._began
            if began is None:
                continue
            left = began + self._limit - time.monotonic()
            if left <= 0:
                self._bark()
                return
            self._closed.wait(left)
