"""A server over a scripted engine with the connections that the command line makes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from miniinfer.server.app import make_app
from miniinfer.server.config import ServerConfig
from miniinfer.server.run import bind, listen


@contextlib.asynccontextmanager
async def serving(engine: Any, **fields: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve on a free port; yields a session to it. `session._base_url.port` is the port."""
    loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loaded.set_result(engine)
    app = make_app(loaded, ServerConfig(**{"stats_interval": 0, **fields}))
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        runner = await listen(app, listener)
        try:
            port = listener.getsockname()[1]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                yield session
        finally:
            await runner.cleanup()
