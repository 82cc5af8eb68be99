"""Runs the application over connections of our own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from aiohttp import web

from .connection import ConnectionServer
from .state import STATE


class Runner(web.AppRunner):
    """An `AppRunner` whose every error is JSON, and whose handlers end when their client leaves."""

    __slots__ = ()

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, handler_cancellation=True, **options)

    async def _make_server(self) -> web.Server:
        # aiohttp has no public way to say which class handles a connection.
        state = self.app[STATE]
        return ConnectionServer(await super()._make_server(), state.config, state.metrics)


class Site(web.SockSite):
    """A `SockSite` that gives a client `handshake_seconds` for its TLS handshake."""

    __slots__ = ("_handshake_seconds",)

    def __init__(
        self,
        runner: Runner,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
        *,
        backlog: int,
    ) -> None:
        super().__init__(runner, listener, ssl_context=tls, backlog=backlog)
        self._handshake_seconds = handshake_seconds

    async def start(self) -> None:
        """Listen."""
        # aiohttp has no way to set the limit: what `SockSite` does, with it.
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None, "the runner is set up"
        self._server = await asyncio.get_running_loop().create_server(
            server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_seconds if self._ssl_context else None,
        )
