"""What is noted of one HTTP request while it is answered: for logs, metrics and traces."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from .admission import Ticket


@dataclass(slots=True)
class RequestRecord:
    """Numbers and names alone: no text of a prompt or an answer is ever kept here.

    Times are of `time.monotonic`, in seconds.
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    answer_id: str | None = None
    """The id in the body of its answer."""
    tenant: str = ""
    """Whose API key opened the server."""
    ticket: Ticket | None = None
    """Its place in the queue, while it generates."""
    submitted: float | None = None
    first_token: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    """Of its last choice to end."""
    error_code: str | None = None

    def seconds_to(self, moment: float | None) -> float | None:
        """Return how long after its start something was, if it was."""
        return None if moment is None else moment - self.started


RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)

_current: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def begin_record(request: web.Request, request_id: str) -> RequestRecord:
    """Start the record of a request; what its task does finds it with `current_record`."""
    record = RequestRecord(request_id)
    request[RECORD] = record
    _current.set(record)
    return record


def current_record() -> RequestRecord:
    """Return the record of the request that the running task answers.

    Outside of a request it is one that nobody reads.
    """
    return _current.get() or RequestRecord("")
