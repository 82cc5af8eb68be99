"""A route of the server, and what its callers may know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from .errors import ApiError, ErrorAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method and a path with their handler, described for /openapi.json."""

    method: str
    path: str
    """In aiohttp's form: `{name}` or `{name:regex}` is a parameter."""
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    """The JSON that it reads."""
    answers: Mapping[int, Any] = field(default_factory=dict)
    """By status: the type of the JSON, `str` for plain text, None for no body."""
    events: Any = None
    """The type of the events that it sends if the body says `stream`."""
    errors: tuple[int, ...] = ()
    """Statuses with an error object, besides those that every route has."""
    error: Any = ErrorAnswer
    """The type of these error objects."""
    needs_key: bool = True
    """Asks for an API key where the server has any."""

    def definition(self) -> web.RouteDef:
        """Return the route as aiohttp takes it."""
        if self.method == "GET":
            # This one takes HEAD too.
            return web.get(self.path, self.handler, expect_handler=_expect)
        return web.route(self.method, self.path, self.handler, expect_handler=_expect)


async def _expect(request: web.Request) -> None:
    """Answer the header Expect, which aiohttp by itself refuses with plain text."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        error = ApiError(417, f"Expect must be 100-continue, got {expected!r}", code="bad_http")
        body = error.body().decode()
        raise web.HTTPExpectationFailed(text=body, content_type="application/json")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The answer itself has not begun.
    request.writer.output_size = 0
