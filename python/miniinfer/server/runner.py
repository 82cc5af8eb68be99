"""Runs the application over connections of our own."""

from __future__ import annotations

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
