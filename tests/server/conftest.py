from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from miniinfer import AsyncLLM
from miniinfer.server.app import make_app
from miniinfer.server.config import ServerConfig
from miniinfer.server.keys import ApiKey
from miniinfer.server.runner import Runner

from .fake import FakeEngine
from .real import real_server, until_idle


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


@dataclass(frozen=True)
class TinyServer:
    url: str
    llm: AsyncLLM


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny_server(tiny_model: Path) -> AsyncIterator[TinyServer]:
    """A server over a real engine and the tiny model, shared by the tests of a file.

    They run in its event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
    """
    async with real_server(tiny_model, {"max_model_len": 256}) as (url, llm):
        yield TinyServer(url, llm)
        await until_idle(llm)
