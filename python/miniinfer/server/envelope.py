"""Ids and other marks that a request and all of its answer carry."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web

from miniinfer import __version__

from .generation import Origin
from .keys import ApiKey, party_salt
from .protocol import GenerationRequest
from .record import current_record
from .state import STATE

SYSTEM_FINGERPRINT = f"miniinfer-{__version__}"
SERVER_SOFTWARE = f"miniinfer/{__version__}"

CLIENT_ID: web.RequestKey[str | None] = web.RequestKey("client_id", str)
"""The X-Request-Id header, if it is short and plain."""
API_KEY: web.RequestKey[ApiKey] = web.RequestKey("api_key", ApiKey)
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
    key = request.get(API_KEY)
    salt = body.cache_salt
    if key is not None and not request.app[STATE].config.share_prefix_cache:
        salt = party_salt(key.tenant, salt)
    record = current_record()
    record.answer_id = new_request_id(prefix, client_id, separator)
    return Origin(
        request_id=record.answer_id,
        priority=body.priority,
        tenant=tenant_of(key, body.user),
        cache_salt=salt,
    )


def new_request_id(prefix: str, client_id: str | None, separator: str = "-") -> str:
    """Return an id that no other request has, with the client's own id inside if it has one.

    Two requests with one client id get two ids.
    """
    unique = uuid.uuid4().hex
    own = f"{client_id}{separator}{unique[:16]}" if client_id else unique
    return f"{prefix}{separator}{own}"


def tenant_of(key: ApiKey | None, user: str | None) -> str:
    """Return the party that fairness counts a request to: the API key's holder and its user."""
    holder = key.tenant if key else ""
    return f"{holder}/{user}" if user else holder
