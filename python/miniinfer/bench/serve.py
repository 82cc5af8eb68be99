"""A load client: an open loop with Poisson arrivals, or a closed one with so many clients.

An open loop sends as users do, whether or not the server keeps up; a closed loop waits for each
answer before it sends the next, and shows how much a server can do.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from miniinfer.server_failures import refusal

from .serve_client import PATHS, RequestResult, not_connected, send
from .serve_load import bodies_from_file, poisson_arrivals, random_bodies


class CannotMeasure(RuntimeError):
    """The server cannot be measured; the message is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What to send where. Either `rate` or `concurrency` is set."""

    url: str
    """The server's address, without /v1."""
    endpoint: str = "chat"
    """chat or completions."""
    model: str | None = None
    """None takes the first that the server lists."""
    api_key: str | None = None
    num_requests: int = 100
    num_warmup: int = 4
    """Requests ahead of those, which are not counted."""
    rate: float | None = None
    """Requests a second, on average."""
    concurrency: int | None = None
    """Clients that each wait for their answer."""
    prompts: Path | None = None
    """File of prompts; None makes random ones."""
    input_words: int = 128
    shared_words: int = 0
    max_tokens: int = 64
    extra_body: dict[str, Any] | None = None
    """More fields for every request."""
    seed: int = 0
    timeout: float = 600.0
    tls: ssl.SSLContext | None = None
    """How an https server is verified; None is by the system's certificates."""

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ValueError(f"endpoint must be one of {', '.join(PATHS)}, got {self.endpoint!r}")
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("set either rate or concurrency")
        for name in ("num_requests", "input_words", "max_tokens", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("num_warmup", "shared_words"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What came of a load."""

    results: list[RequestResult]
    seconds: float
    """From the first request to the last answer."""
    model: str


async def run_load(settings: LoadSettings) -> LoadRun:
    """Warm the server up, send the load and return every result; raises `CannotMeasure`."""
    bodies = _bodies(settings)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    # The client must not be the limit: as many connections as there are requests.
    connector = aiohttp.TCPConnector(limit=0, ssl=settings.tls or True)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=no_limit
    ) as session:
        model = settings.model or await _first_model(session, settings.url)
        for body in bodies:
            body.setdefault("model", model)
        url = settings.url + PATHS[settings.endpoint]
        warm, counted = bodies[: settings.num_warmup], bodies[settings.num_warmup :]
        for body in warm:
            result = await send(session, url, body, settings.timeout)
            if result.error is not None:
                reason = result.reason or result.error
                raise CannotMeasure(f"a request to warm up failed: {reason}")
        began = time.perf_counter()
        if settings.rate is not None:
            results = await _open_loop(session, url, counted, settings)
        else:
            results = await _closed_loop(session, url, counted, settings)
        return LoadRun(results, time.perf_counter() - began, model)


def _bodies(settings: LoadSettings) -> list[dict[str, Any]]:
    count = settings.num_warmup + settings.num_requests
    if settings.prompts is not None:
        bodies = bodies_from_file(settings.prompts, count, settings.max_tokens, settings.endpoint)
    else:
        bodies = random_bodies(
            count,
            settings.input_words,
            settings.max_tokens,
            settings.endpoint,
            settings.seed,
            settings.shared_words,
        )
    return [body | (settings.extra_body or {}) for body in bodies]


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status != 200:
                reason = refusal(response.status, response.reason, await response.read())
                raise CannotMeasure(f"{url}/v1/models answers {response.status}: {reason}")
            return str((await response.json())["data"][0]["id"])
    except aiohttp.ClientError as error:
        raise CannotMeasure(not_connected(url, error)) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CannotMeasure(f"{url}/v1/models lists no model; name one") from error


async def _open_loop(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[dict[str, Any]],
    settings: LoadSettings,
) -> list[RequestResult]:
    assert settings.rate is not None, "an open loop has a rate"
    began = time.perf_counter()
    tasks = []
    arrivals = poisson_arrivals(settings.rate, len(bodies), settings.seed)
    for at, body in zip(arrivals, bodies, strict=True):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(send(session, url, body, settings.timeout)))
    return await asyncio.gather(*tasks)


async def _closed_loop(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[dict[str, Any]],
    settings: LoadSettings,
) -> list[RequestResult]:
    left = iter(bodies)
    results: list[RequestResult] = []

    async def client() -> None:
        for body in left:
            results.append(await send(session, url, body, settings.timeout))

    assert settings.concurrency is not None, "a closed loop has clients"
    await asyncio.gather(*(client() for _ in range(min(settings.concurrency, len(bodies)))))
    return results
