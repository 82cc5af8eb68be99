"""What happens around every handler: errors as JSON, request ids, keys, CORS, loading."""

from __future__ import annotations

import asyncio
import hmac
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from . import messages_errors
from .envelope import API_KEY, CLIENT_ID, plain_client_id
from .errors import ApiError, from_http_exception, internal
from .state import STATE

OPEN_PATHS = frozenset(("/health", "/ping"))
"""No key is asked for here, so that probes need none."""
HEALTH_PATHS = OPEN_PATHS | {"/healthz"}
_RESPONSE_ID: web.RequestKey[str] = web.RequestKey("response_id", str)
_CORS_MAX_AGE_SECONDS = 600


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every answer a request id and every failure a JSON body."""
    client_id = plain_client_id(request.headers.get("X-Request-Id"))
    request[CLIENT_ID] = client_id
    request[_RESPONSE_ID] = client_id or uuid.uuid4().hex
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        refusal = from_http_exception(error, request.method, request.path)
        return _error_response(request, refusal)
    except asyncio.CancelledError:
        aborted = request.app[STATE].aborted()
        if aborted is None:
            raise
        return _error_response(request, aborted)
    except Exception:
        request.app.logger.exception("%s %s failed", request.method, request.path)
        return _error_response(request, internal())


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    """Return an error in the shape of the API that the path belongs to."""
    if messages_errors.is_messages_path(request.path):
        return messages_errors.error_response(error, request[_RESPONSE_ID])
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
    keys = request.app[STATE].config.api_keys
    if keys and request.path not in OPEN_PATHS and request.method != "OPTIONS":
        given = _given_key(request)
        # Every key is compared, so the time tells nothing of which one came close.
        # Bytes of a header that are not UTF-8 come as lone surrogates.
        sent = given.encode("utf-8", "surrogateescape")
        valid = [hmac.compare_digest(sent, key.encode()) for key in keys]
        if not any(valid):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request[API_KEY] = given
    return await handler(request)


@web.middleware
async def loading(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse everything but health while there is no engine."""
    state = request.app[STATE]
    known = request.match_info.http_exception is None
    if known and request.path not in HEALTH_PATHS and state.loaded_engine is None:
        state.engine()
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id and the CORS headers to any answer, streams and errors too."""
    # What aiohttp refuses by itself, such as an unknown Expect, has not been through `errors`.
    response.headers["X-Request-Id"] = request.get(_RESPONSE_ID) or uuid.uuid4().hex
    if messages_errors.is_messages_path(request.path):
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
