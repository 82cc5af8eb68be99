"""Runs the application so that even what is no HTTP at all is answered with the error object."""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from .errors import ApiError, internal


class Runner(web.AppRunner):
    """An `AppRunner` whose every error is JSON, and whose handlers end when their client leaves."""

    __slots__ = ()

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, handler_cancellation=True, **options)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        # aiohttp has no public way to say which class handles a connection.
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One connection; aiohttp itself answers what it cannot parse with plain text."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that has not come as far as a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, and cannot become an error")
        if status < 500:
            error = ApiError(status, f"this is not valid HTTP: {message or exc}", code="bad_http")
        else:
            self.log_exception("%s %s failed", request.method, request.path, exc_info=exc)
            error = internal()
        response = error.response()
        response.headers["X-Request-Id"] = uuid.uuid4().hex
        response.force_close()
        return response
