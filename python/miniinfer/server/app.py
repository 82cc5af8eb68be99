"""The aiohttp application: routes, middlewares and the life of what they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from miniinfer.safe_logging import safe_logger

from . import middleware
from .config import ServerConfig
from .engine_api import Engine
from .openapi import OPENAPI, OpenApi
from .responses_store import RESPONSES, ResponseStore
from .routes import ROUTES
from .state import STATE, ServerState
from .stats_log import log_stats
from .tracing import Tracing

logger = safe_logger("miniinfer.server")


def make_app(
    engine: asyncio.Future[Engine], config: ServerConfig, tracing: Tracing | None = None
) -> web.Application:
    """Return the application over an engine that is loaded or will be.

    Until `engine` is done, /health answers 503 "loading" and everything else 503. The
    application closes the engine when it is cleaned up. Run it with `runner.Runner`: under
    aiohttp's own, a client that leaves before a whole answer is ready does not end its request.
    `tracing` takes each request's times when it is answered.
    """
    app = web.Application(
        logger=logger,
        client_max_size=config.max_body_size,
        middlewares=[
            middleware.errors,
            middleware.preflight,
            middleware.api_key,
            middleware.loading,
        ],
    )
    app[STATE] = ServerState(engine, config, tracing)
    app[RESPONSES] = ResponseStore()
    app[OPENAPI] = OpenApi(ROUTES, keys=bool(config.api_keys))
    app.cleanup_ctx.append(_lifetime)
    app.on_response_prepare.append(middleware.add_headers)
    app.on_response_prepare.append(middleware.count_response)
    app.add_routes([route.definition() for route in ROUTES])
    return app


async def _lifetime(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    statistics = asyncio.create_task(log_stats(state)) if state.config.stats_interval else None
    yield
    if statistics is not None:
        statistics.cancel()
        await asyncio.gather(statistics, return_exceptions=True)
    state.executor.shutdown(wait=False, cancel_futures=True)
    engine = state.loaded_engine
    if engine is not None:
        await engine.close()
    if state.tracing is not None:
        await asyncio.to_thread(state.tracing.close)
