"""What happens around every handler: errors as JSON, request ids, keys, CORS, loading."""

from __future__ import annotations

import asyncio
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from . import messages_errors
from .access_log import CLIENT_LEFT, log_access, route_of
from .envelope import API_KEY, CLIENT_ID, SERVER_SOFTWARE, plain_client_id
from .errors import ApiError, from_http_exception, internal
from .keys import find_key
from .record import RECORD, RequestRecord, begin_record
from .state import STATE
from .tracing import Tracing

OPEN_PATHS = frozenset(("/health", "/ping", "/ready"))
"""No key is asked for here, so that probes need none."""
HEALTH_PATHS = OPEN_PATHS | {"/healthz"}
_CORS_MAX_AGE_SECONDS = 600


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every answer a request id and every failure a JSON body."""
    client_id = plain_client_id(request.headers.get("X-Request-Id"))
    request[CLIENT_ID] = client_id
    record = begin_record(request, client_id or uuid.uuid4().hex)
    state = request.app[STATE]
    status = CLIENT_LEFT
    try:
        response = await _answer(request, handler, record)
        status = response.status
        return response
    except asyncio.CancelledError:
        # aiohttp logs no request whose client has left.
        state.metrics.count_response(route_of(request), CLIENT_LEFT)
        if state.config.access_log:
            log_access(request, CLIENT_LEFT)
        raise
    finally:
        if state.tracing is not None:
            _trace(state.tracing, request, record, status)


def _trace(tracing: Tracing, request: web.Request, record: RequestRecord, status: int) -> None:
    try:
        tracing.finish(request, record, route_of(request), status)
    except Exception:
        # Whatever is wrong with traces, the request is not.
        request.app.logger.exception("a span could not be made")


async def _answer(
    request: web.Request, handler: Handler, record: RequestRecord
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as raised:
        error = raised
    except web.HTTPException as raised:
        error = from_http_exception(raised, request.method, request.path)
    except asyncio.CancelledError:
        aborted = request.app[STATE].aborted()
        if aborted is None:
            raise
        error = aborted
    except Exception:
        request.app.logger.exception("%s %r failed", request.method, request.path)
        error = internal()
    record.error_code = error.code
    if messages_errors.is_for_messages(request):
        return messages_errors.error_response(error, record.request_id)
    return error.response()


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a CORS preflight before any key is asked for."""
    is_preflight = (
        request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    )
    if not is_preflight or _allowed_origin(request) is None:
        return await handler(request)
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "authorization, content-type"
            ),
            "Access-Control-Max-Age": str(_CORS_MAX_AGE_SECONDS),
        },
    )


@web.middleware
async def api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request without a valid key, if the server has keys."""
    state = request.app[STATE]
    keys = state.config.api_keys
    if keys and not _is_open(request) and request.method != "OPTIONS":
        # Bytes of a header that are not UTF-8 come as lone surrogates.
        key = find_key(keys, _given_key(request).encode("utf-8", "surrogateescape"))
        if key is None:
            state.metrics.reject("invalid_api_key")
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request[API_KEY] = key
        request[RECORD].tenant = key.tenant
    return await handler(request)


def _is_open(request: web.Request) -> bool:
    if request.path == "/metrics":
        return request.app[STATE].config.metrics_without_key
    return request.path in OPEN_PATHS


@web.middleware
async def loading(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse everything but health while there is no engine."""
    state = request.app[STATE]
    known = request.match_info.http_exception is None
    if known and request.path not in HEALTH_PATHS and state.loaded_engine is None:
        state.engine()
    return await handler(request)


async def count_response(request: web.Request, response: web.StreamResponse) -> None:
    """Count any answer when it begins."""
    request.app[STATE].metrics.count_response(route_of(request), response.status)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id and the CORS headers to any answer, streams and errors too."""
    response.headers["Server"] = SERVER_SOFTWARE
    # What aiohttp refuses by itself, such as an unknown Expect, has not been through `errors`.
    record = request.get(RECORD)
    response.headers["X-Request-Id"] = record.request_id if record else uuid.uuid4().hex
    if messages_errors.is_for_messages(request):
        response.headers["request-id"] = response.headers["X-Request-Id"]
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, request-id, Retry-After"
        if origin != "*":
            response.headers["Vary"] = "Origin"
    if request.app[STATE].draining:
        # The header for the client, as aiohttp has written its own by now; the call for aiohttp.
        response.headers["Connection"] = "close"
        response.force_close()


def _allowed_origin(request: web.Request) -> str | None:
    allowed = request.app[STATE].config.allowed_origins
    origin = request.headers.get("Origin")
    if origin is None or not allowed:
        return None
    if "*" in allowed:
        return "*"
    return origin if origin in allowed else None


def _given_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("X-Api-Key", "")
