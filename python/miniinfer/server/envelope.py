"""Ids and other marks that a request and all of its answer carry."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web

from miniinfer import __version__

from .generation import Origin
from .protocol import GenerationRequest

SYSTEM_FINGERPRINT = f"miniinfer-{__version__}"

CLIENT_ID: web.RequestKey[str | None] = web.RequestKey("client_id", str)
"""The X-Request-Id header, if it is short and plain."""
API_KEY: web.RequestKey[str | None] = web.RequestKey("api_key", str)
"""The key that opened the server to this request."""

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every chunk of an answer repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


def plain_client_id(client_id: str | None) -> str | None:
    """Return a client's own request id if it is short and plain, else None."""
    return client_id if client_id and _PLAIN_ID.fullmatch(client_id) else None


def origin_of(
    request: web.Request, body: GenerationRequest, prefix: str, *, separator: str = "-"
) -> Origin:
    """Return who asks; raises nothing."""
    client_id = plain_client_id(body.request_id) or request.get(CLIENT_ID)
    return Origin(
        request_id=new_request_id(prefix, client_id, separator),
        priority=body.priority,
        tenant=tenant_of(request.get(API_KEY), body.user),
        cache_salt=body.cache_salt,
    )


def new_request_id(prefix: str, client_id: str | None, separator: str = "-") -> str:
    """Return an id that no other request has, with the client's own id inside if it has one.

    Two requests with one client id get two ids.
    """
    unique = uuid.uuid4().hex
    own = f"{client_id}{separator}{unique[:16]}" if client_id else unique
    return f"{prefix}{separator}{own}"


def tenant_of(api_key: str | None, user: str | None) -> str:
    """Return the party that fairness counts a request to: the API key's holder and its user."""
    holder = hashlib.sha256(api_key.encode()).hexdigest()[:16] if api_key else ""
    return f"{holder}/{user}" if user else holder
