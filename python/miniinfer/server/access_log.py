"""One line for each request: its id, route, status, times and tokens, and never its text."""

from __future__ import annotations

import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from miniinfer.safe_logging import safe_logger

from .record import RECORD

logger = safe_logger("miniinfer.access")

CLIENT_LEFT = 499
"""The status that is noted for a client that left before its answer; nginx made the number."""
OTHER_ROUTE = "other"

_PROBES = ("/health", "/ping", "/ready", "/metrics")
_PROBE_ANSWERS = (200, 503)
"""Not that of a probe without its key, which never passes."""


def route_of(request: web.BaseRequest) -> str:
    """Return the pattern of the route that a request matched; all that match none share one."""
    if not isinstance(request, web.Request) or RECORD not in request:
        # It was answered before it was routed.
        return OTHER_ROUTE
    resource = request.match_info.route.resource
    return OTHER_ROUTE if resource is None else resource.canonical


def log_access(request: web.BaseRequest, status: int) -> None:
    """Log one request; probes, which come every few seconds, at the level of debugging."""
    level = logging.DEBUG if request.path in _PROBES and status in _PROBE_ANSWERS else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = access_fields(request, status)
    line = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    logger.log(level, "%s", line, extra={"fields": fields})


def access_fields(request: web.BaseRequest, status: int) -> dict[str, Any]:
    """Return what is logged of a request, by name; times in seconds."""
    route = route_of(request)
    fields: dict[str, Any] = {
        "client": request.remote,
        "method": request.method,
        "route": request.path[:200] if route == OTHER_ROUTE else route,
        "status": status,
    }
    record = request.get(RECORD)
    if record is None:
        return fields
    fields["duration"] = time.monotonic() - record.started
    fields["id"] = record.request_id
    optional = {
        "answer_id": record.answer_id,
        "key": record.tenant or None,
        "code": record.error_code,
        "submitted": record.seconds_to(record.submitted),
        "first_token": record.seconds_to(record.first_token),
        "finish_reason": record.finish_reason,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    if record.submitted is not None:
        fields["prompt_tokens"] = record.num_prompt_tokens
        fields["cached_tokens"] = record.num_cached_tokens
        fields["output_tokens"] = record.num_output_tokens
    return fields


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


class AccessLogger(AbstractAccessLogger):
    """Logs what aiohttp has answered."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log one answer; `time` is not used, as the record has its own."""
        log_access(request, response.status)
