"""Reads streams whose events have names, as strictly as `sse_client` reads those without."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse


async def read_named_events(response: ClientResponse) -> list[dict[str, Any]]:
    """Return the data of all events; asserts that their names are their types.

    Such streams end with their last event, without a `[DONE]`. Pings are left out.
    """
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    return parse_named_events(await response.text())


def parse_named_events(body: str) -> list[dict[str, Any]]:
    """Return the data of each event, without comments and pings."""
    assert body.endswith("\n\n")
    events = []
    for block in body[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert data.startswith("data: ")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            events.append(event)
    return events
