"""Servers over a real engine and a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from miniinfer import AsyncLLM, EngineArgs
from miniinfer.server.app import make_app
from miniinfer.server.config import ServerConfig
from miniinfer.server.runner import Runner

PATIENCE = 30.0
"""Seconds after which a wait is a hang, on however slow a machine."""

SIZES: dict[str, Any] = {
    "num_kv_blocks": 256,
    "block_size": 4,
    "max_model_len": 200,
    "max_num_seqs": 16,
    "served_model_name": "tiny",
}


@contextlib.asynccontextmanager
async def real_server(
    model: Path, sizes: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[str, AsyncLLM]]:
    """Serve on a free port; yields the server's address and its engine."""
    args = EngineArgs(model=str(model), **(SIZES | (sizes or {})))
    llm = await asyncio.to_thread(AsyncLLM.from_args, args)
    async with serving(llm, **fields) as url:
        yield url, llm


@contextlib.asynccontextmanager
async def serving(llm: Any, **fields: Any) -> AsyncIterator[str]:
    """Serve over an engine, which is closed at the end; yields the server's address."""
    engine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    engine.set_result(llm)
    app = make_app(engine, ServerConfig(**({"stats_interval": 0} | fields)))
    runner = Runner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def until_idle(llm: AsyncLLM) -> None:
    """Every request is gone and every block free."""
    core = llm.engine.core
    async with asyncio.timeout(PATIENCE):
        while core.has_requests() or core.stats()["kv_blocks_used"]:
            await asyncio.sleep(0.005)
    core.check()
    assert not llm._by_choice
    assert not llm._ids
