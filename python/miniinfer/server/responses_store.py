"""Stored responses: what GET /v1/responses/{id} and `previous_response_id` find.

They are kept in memory, the least recently used are forgotten first, and none outlives the server.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from aiohttp import web

from .responses_protocol import InputItem

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Of bodies and conversations together, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response that has ended."""

    body: bytes
    """The response object as JSON."""
    conversation: bytes
    """The items that led to it and its own, as JSON."""

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.body) + len(self.conversation)

    def items(self) -> list[InputItem]:
        """Return the conversation, the answer at its end."""
        return msgspec.json.decode(self.conversation, type=list[InputItem])


class ResponseStore:
    """Responses by holder and id; used on the event loop's thread only.

    A holder is whoever holds an API key: nobody finds the responses of another.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def put(self, holder: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and forget old ones for it; one that is too large is not kept."""
        if response.size > self._max_bytes:
            return
        self.delete(holder, response_id)
        self._responses[holder, response_id] = response
        self._bytes += response.size
        while len(self._responses) > self._max_responses or self._bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """Return a response, which now counts as used, or None."""
        found = self._responses.get((holder, response_id))
        if found is not None:
            self._responses.move_to_end((holder, response_id))
        return found

    def delete(self, holder: str, response_id: str) -> bool:
        """Forget a response; False if there is none."""
        found = self._responses.pop((holder, response_id), None)
        if found is None:
            return False
        self._bytes -= found.size
        return True


RESPONSES: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)
