"""The aiohttp application: routes, middlewares and the life of what they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from . import middleware, utility
from .chat import chat_completions
from .completions import completions
from .config import ServerConfig
from .engine_api import Engine
from .generate import generate
from .state import STATE, ServerState
from .stats_log import log_stats

logger = logging.getLogger("miniinfer.server")


def make_app(engine: asyncio.Future[Engine], config: ServerConfig) -> web.Application:
    """Return the application over an engine that is loaded or will be.

    Until `engine` is done, /health answers 503 "loading" and everything else 503. The
    application closes the engine when it is cleaned up. Run it with `runner.Runner`: under
    aiohttp's own, a client that leaves before a whole answer is ready does not end its request.
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
    app[STATE] = ServerState(engine, config)
    app.cleanup_ctx.append(_lifetime)
    app.on_response_prepare.append(middleware.add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/models", utility.list_models),
            web.get("/v1/models/{id:.+}", utility.get_model),
            web.post("/generate", generate),
            web.post("/tokenize", utility.tokenize),
            web.post("/detokenize", utility.detokenize),
            web.post("/reset_prefix_cache", utility.reset_prefix_cache),
            web.get("/health", utility.health),
            web.get("/ping", utility.health),
            web.get("/healthz", utility.health_details),
            web.get("/version", utility.version),
            web.get("/load", utility.load),
            web.get("/metrics", utility.metrics),
        ]
    )
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
