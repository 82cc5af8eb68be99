from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from miniinfer.server.app import make_app
from miniinfer.server.config import ServerConfig
from miniinfer.server.keys import ApiKey
from miniinfer.server.runner import Runner

from .fake import FakeEngine


class Server(TestServer):
    """Serves as `miniinfer serve` does."""

    async def _make_runner(self, **options: Any) -> Runner:
        options.pop("handler_cancellation", None)
        return Runner(self.app, **options)


Start = Callable[..., Awaitable[TestClient]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start servers over fake engines: `await start(engine, **config fields)`."""
    clients: list[TestClient] = []

    async def start_one(engine: FakeEngine | asyncio.Future[Any], **fields: Any) -> TestClient:
        if isinstance(engine, FakeEngine):
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_result(engine)
        else:
            future = engine
        fields["api_keys"] = tuple(map(ApiKey.of, fields.get("api_keys", ())))
        tracing = fields.pop("tracing", None)
        app = make_app(future, ServerConfig(**{"stats_interval": 0, **fields}), tracing)
        server = Server(app)
        await server.start_server()
        client = TestClient(server)
        clients.append(client)
        return client

    yield start_one
    for client in clients:
        await client.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(start: Start, engine: FakeEngine) -> TestClient:
    return await start(engine)
