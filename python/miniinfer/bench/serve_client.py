"""One request to a server that speaks OpenAI's API, with the time of everything that comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from miniinfer.server_failures import refusal, unreachable

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(slots=True)
class RequestResult:
    """What one request took; times are of `time.perf_counter`, in seconds."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each event with text came; a server may put several tokens into one."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """What kind of failure it was, if it failed."""
    reason: str | None = None
    """The failure in the server's own words or the system's, if they say more than its kind."""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.arrivals[0] - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, if there are any."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


async def send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout: float
) -> RequestResult:
    """Send one request as a stream and read it to its end. Raises nothing: failures are counted."""
    result = RequestResult(time.perf_counter())
    try:
        async with asyncio.timeout(timeout):
            async with session.post(url, json=body) as response:
                if response.status != 200:
                    result.error = f"HTTP {response.status}"
                    answer = await response.read()
                    result.reason = refusal(response.status, response.reason, answer)
                else:
                    result.error = await _read(response, result)
                    _leave(response)
    except TimeoutError:
        result.error = "timeout"
    except (aiohttp.ClientError, ConnectionError) as error:
        result.error = f"connection: {type(error).__name__}"
        result.reason = not_connected(url, error)
    except (ValueError, KeyError, TypeError, IndexError):
        result.error = "not a stream of OpenAI's"
    result.ended = time.perf_counter()
    if result.error is None and not result.arrivals:
        result.error = "no text"
    return result


def not_connected(url: str, error: Exception) -> str:
    """Return why a request to a server's URL got no answer, from what aiohttp raised."""
    cause: Exception = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    return unreachable(urlsplit(url).netloc, cause)


async def _read(response: aiohttp.ClientResponse, result: RequestResult) -> str | None:
    """Read events up to `[DONE]`; returns the kind of failure, if it failed."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            # Servers that report no usage are counted by their events.
            result.output_tokens = result.output_tokens or len(result.arrivals)
            return None
        event = json.loads(data)
        if not isinstance(event, dict):
            raise TypeError("an event is an object")
        if "error" in event:
            error = event["error"]
            if message := error.get("message"):
                result.reason = str(message)
            return f"stream error: {error.get('code') or error.get('type')}"
        if usage := event.get("usage"):
            result.prompt_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
        if any(_has_text(choice) for choice in event.get("choices", ())):
            result.arrivals.append(now)
    return "cut off"


def _leave(response: aiohttp.ClientResponse) -> None:
    """End a TLS connection whose answer is not read to its last byte.

    It is not used again, and would wait for the server's farewell, perhaps longer than there is an
    event loop.
    """
    transport = None if response.connection is None else response.connection.transport
    if transport is not None and transport.get_extra_info("sslcontext") is not None:
        transport.abort()


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    names = ("content", "reasoning_content", "tool_calls")
    return any(delta.get(name) for name in names)
