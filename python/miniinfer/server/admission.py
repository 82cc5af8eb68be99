"""How many may wait, how many tokens they may bring, and when to come again if it is full.

A request is queued from its arrival until its first token, while it waits or is prefilled. It is
counted before its prompt is looked at: a burst is refused without being tokenised.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from .config import ServerConfig
from .errors import RETRY_AFTER_SECONDS, ApiError, overloaded

_MAX_RETRY_SECONDS = 120
_SAMPLES = 64
"""Departures that the measured rate looks back on."""


class RequestQueue:
    """Counts what is queued; used on the event loop's thread only."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.num_requests = 0
        self.num_tokens = 0
        self._by_tenant: Counter[str] = Counter()
        self._departures: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def refusal(self, tenant: str = "") -> ApiError | None:
        """Return the 429 for a request that comes now, or None if there is room."""
        config = self._config
        limit = config.max_queued_requests
        if limit is not None and self.num_requests >= limit:
            return self._full("queue_full", f"{self.num_requests} requests", "requests", limit)
        limit = config.max_queued_tokens
        if limit is not None and self.num_tokens >= limit:
            return self._full("queue_tokens_full", f"{self.num_tokens} tokens", "tokens", limit)
        limit = config.max_queued_requests_per_key
        if limit is not None and self._by_tenant[tenant] >= limit:
            mine = f"{self._by_tenant[tenant]} requests of this API key"
            return self._full("key_queue_full", mine, "requests_per_key", limit)
        return None

    def enter(self, tenant: str = "") -> Ticket:
        """Count a request that has arrived."""
        self.num_requests += 1
        self._by_tenant[tenant] += 1
        wait = self._config.max_queue_time
        return Ticket(self, tenant, None if wait is None else self._clock() + wait)

    def retry_after(self) -> int:
        """Return the seconds after which what is queued now should have been served."""
        if len(self._departures) < 2:
            return RETRY_AFTER_SECONDS
        elapsed = max(self._clock() - self._departures[0][0], 1e-3)
        # The first departure is where the clock starts: what left with it came before.
        requests = len(self._departures) - 1
        tokens = sum(tokens for _, tokens in self._departures) - self._departures[0][1]
        seconds = self.num_requests * elapsed / requests
        if tokens:
            seconds = max(seconds, self.num_tokens * elapsed / tokens)
        return max(1, min(math.ceil(seconds), _MAX_RETRY_SECONDS))

    def leave(self, tenant: str, tokens: int) -> None:
        """Uncount a request that has a token or has ended; for its ticket."""
        self.num_requests -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._departures.append((self._clock(), tokens))

    def _full(self, code: str, queued: str, limited: str, limit: int) -> ApiError:
        return overloaded(
            f"the queue is full: {queued} wait for a first token, and the limit is {limit} "
            f"(--max-queued-{limited.replace('_', '-')})",
            code,
            self.retry_after(),
        )


class Ticket:
    """One request's place in the queue."""

    def __init__(self, queue: RequestQueue, tenant: str, deadline: float | None) -> None:
        self.deadline = deadline
        """When it must have a token, by the clock of the event loop, if it must."""
        self._queue = queue
        self._tenant = tenant
        self._waiting: dict[int, int] = {}
        self._tokens = 0
        self._queued = True

    def submitted(self, prompt: int, tokens: int) -> None:
        """Count a prompt of so many tokens."""
        if self._queued:
            self._waiting[prompt] = tokens
            self._tokens += tokens
            self._queue.num_tokens += tokens

    def answered(self, prompt: int) -> None:
        """Uncount a prompt that has a token, and the request with its last one."""
        tokens = self._waiting.pop(prompt, None)
        if tokens is not None:
            self._queue.num_tokens -= tokens
            if not self._waiting:
                self._leave()

    def close(self) -> None:
        """Uncount what is left; harmless when nothing is."""
        self._queue.num_tokens -= sum(self._waiting.values())
        self._waiting.clear()
        self._leave()

    def _leave(self) -> None:
        if self._queued:
            self._queued = False
            self._queue.leave(self._tenant, self._tokens)
