"""Connections: how many, for how long, and what becomes of one that the client has half closed.

A client may close its sending side once its request is out, and still wants the answer. To the
server that looks like a client that has gone. aiohttp takes it for the latter; here the answer goes
on, and while none of it is sent the client is asked: a `100 Continue`, which every HTTP/1.1 client
must skip (RFC 9110, 15.2), makes the system of a client that has gone reset the connection.
HTTP/1.0 has no such thing. There the answer's own first bytes, which are the same for every answer,
are sent one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import uuid
from collections.abc import Iterable
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from miniinfer.bursts import Outlet

from .access_log import AccessLogger
from .access_log import logger as access_logger
from .config import ServerConfig
from .envelope import SERVER_SOFTWARE
from .errors import ApiError, internal, unavailable
from .metrics import Metrics

_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STREAM_PROBE = b"e\r\n: keep-alive\n\n\r\n"
"""A comment, as a chunk: what asks once a stream has begun."""
_STREAM_COMMENT = b": keep-alive\n\n"
"""The same where there are no chunks."""
_FIRST_BYTES = b"HTTP/1.0 "
"""What every answer to HTTP/1.0 begins with: so many probes there are before it."""
_PROBE_SECONDS = (0.0, 0.02, 0.1, 0.5)
"""After the client has closed, and from one probe to the next; the last stays."""
_LINGER_SECONDS = 5.0
"""How long the rest of a body is read that the answer did not wait for."""
_SPARE_DESCRIPTORS = 64
"""Left for files, the engine and the connections that are refused."""


class Connection(web.RequestHandler):
    """One client's connection, as aiohttp serves it, with a life of its own after half a close."""

    __slots__ = ("_counter", "_first_bytes", "_prober", "outlet")

    def __init__(self, server: ConnectionServer, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._counter = server
        self._prober: asyncio.TimerHandle | None = None
        self._first_bytes: _FirstBytes | None = None
        self.outlet: Outlet | None = None
        """Where a stream's events go at present, perhaps past the event loop."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        self._counter.count(1)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Uncount it; whatever it was doing is cancelled."""
        self._counter.count(-1)
        # The socket is closed next, and its descriptor anybody's.
        self._recall()
        if self._prober is not None:
            self._prober.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own says bool
        """Return whether to stay open: there is a request without its answer."""
        if self._waiter is not None and not self._waiter.done():
            return False
        self.close()
        self._prober = self._loop.call_later(_PROBE_SECONDS[0], self._probe, 0)
        return True

    def _probe(self, attempt: int) -> None:
        """Ask whether the client is there, again and again until its answer is over."""
        request, transport = self._current_request, self.transport
        if transport is None or transport.is_closing():
            return
        if request is not None:
            # The rest of a body will not come.
            if not request.content.is_eof():
                transport.close()
                return
            if not self._ask(request, transport):
                return
        # Otherwise the request is about to be begun, or its answer to be ended.
        delay = _PROBE_SECONDS[min(attempt + 1, len(_PROBE_SECONDS) - 1)]
        self._prober = self._loop.call_later(delay, self._probe, attempt + 1)

    def _recall(self) -> None:
        if self.outlet is not None:
            self.outlet.recall()

    def _ask(self, request: web.BaseRequest, transport: asyncio.Transport) -> bool:
        """Send what the client must skip or would get anyway; False if the answer says enough."""
        writer: Any = request.writer
        old = request.version < HttpVersion11
        if writer.output_size == 0:
            if not old:
                transport.write(_PROBE)
            elif self._first_bytes is None:
                self._first_bytes = _FirstBytes(self, transport)
            else:
                self._first_bytes.send_one()
        elif writer.length is None and not writer._eof:
            # Between two events of a stream, which are written whole.
            self._recall()
            transport.write(_STREAM_COMMENT if old else _STREAM_PROBE)
        else:
            return False
        return True

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a defect; what is not HTTP is the client's, and no reason to fill a disk."""
        if isinstance(kw.get("exc_info"), HttpProcessingError):
            self.logger.debug(*args, **kw)
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that has not come as far as a handler.

        aiohttp itself answers what it cannot parse with plain text.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, and cannot become an error")
        self.log_exception("%s %r failed", request.method, request.path, exc_info=exc)
        if status < 500:
            error = ApiError(status, f"this is not valid HTTP: {message or exc}", code="bad_http")
        else:
            error = internal()
        response = error.response()
        response.headers["X-Request-Id"] = uuid.uuid4().hex
        response.headers["Server"] = SERVER_SOFTWARE
        response.force_close()
        return response


class _FirstBytes:
    """Stands in for a transport while single bytes of the answer have gone before the rest."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._sent = 0
        # To aiohttp it is the transport.
        connection.transport = self  # type: ignore[assignment]
        self.send_one()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_one(self) -> None:
        """Send the next byte; the last one is kept for the answer."""
        if self._sent < len(_FIRST_BYTES) - 1:
            self._transport.write(_FIRST_BYTES[self._sent : self._sent + 1])
            self._sent += 1

    def write(self, data: bytes) -> None:
        """Write the answer's first bytes, without those that were sent, and step aside."""
        self._connection.transport = self._transport
        self._transport.write(data[self._sent :])

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write pieces, as `write`."""
        self.write(b"".join(pieces))


class _Refusal(asyncio.Protocol):
    """A connection beyond the limit: it is told so, whatever it wants."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        error = unavailable("the server has too many open connections", "connections")
        body = error.body()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {error.headers['Retry-After']}\r\n"
            "Connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


class ConnectionServer(web.Server):
    """Makes a `Connection` of each connection that a client opens, up to a limit."""

    def __init__(self, made: web.Server, config: ServerConfig, metrics: Metrics) -> None:
        """Serve as `made` does, an application's own server."""
        settings: dict[str, Any] = {
            **made._kwargs,
            "keepalive_timeout": config.idle_timeout,
            "lingering_time": _LINGER_SECONDS,
            "max_line_size": config.max_header_size,
            "max_field_size": config.max_header_size,
            "access_log_class": AccessLogger,
            "access_log": access_logger if config.access_log else None,
        }
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=True,
            loop=made._loop,
            **settings,
        )
        self._metrics = metrics
        self._limit = config.max_connections or descriptor_limit()

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        if self._metrics.num_connections >= self._limit:
            self._metrics.reject("connections")
            # asyncio takes any protocol here.
            return _Refusal()  # type: ignore[return-value]
        return Connection(self, loop=self._loop, **self._kwargs)

    def count(self, change: int) -> None:
        """Count connections, for the connections themselves."""
        self._metrics.num_connections += change


def descriptor_limit() -> int:
    """Return how many connections the process may have, after raising its limit to what it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != soft:
        # Some systems name a hard limit that they do not grant.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    return max(1, soft - _SPARE_DESCRIPTORS)
