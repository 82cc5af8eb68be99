"""HTTP errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from .engine_api import Engine

RETRY_AFTER_SECONDS = 5

_MESSAGE_HEAD, _MESSAGE_TAIL = 1000, 400
"""Characters kept of a message that is longer, as it quotes something long."""


class ErrorObject(msgspec.Struct):
    """OpenAI's error object; `param` names a field of the body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is an error."""

    error: ErrorObject


class ApiError(Exception):
    """An answer that is an error: HTTP status, message and OpenAI's type, param and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def fields(self) -> ErrorObject:
        """Return OpenAI's error object."""
        return ErrorObject(self.message, self.type, self.param, self.code)

    def body(self) -> bytes:
        """Return the JSON of the error object under its key `error`."""
        return msgspec.json.encode(ErrorAnswer(self.fields()))

    def response(self) -> web.Response:
        """Return the error as a whole HTTP answer."""
        return web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers=self.headers,
        )


def _shortened(message: str) -> str:
    left_out = len(message) - _MESSAGE_HEAD - _MESSAGE_TAIL
    if left_out <= 0:
        return message
    head, tail = message[:_MESSAGE_HEAD], message[-_MESSAGE_TAIL:]
    return f"{head}... ({left_out} characters left out) ...{tail}"


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """Return a 400 for one parameter of the body."""
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return the error with its parameter's name changed, there and at the head of its message.

    For routes that convert their bodies to those of another.
    """
    name = names.get(error.param or "")
    if name is None:
        return error
    message = re.sub(rf"\b{error.param}\b", name, error.message, count=1)
    return ApiError(
        error.status,
        message,
        type=error.type,
        param=name,
        code=error.code,
        headers=error.headers,
    )


def unavailable(message: str, code: str, *, retry: bool = True) -> ApiError:
    """Return a 503; `retry` adds a Retry-After header."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if retry else {}
    return ApiError(503, message, type="service_unavailable", code=code, headers=headers)


def overloaded(message: str, code: str, retry_after: int) -> ApiError:
    """Return a 429 of a server that has too much to do; `retry_after` is in seconds."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers)


def shutting_down() -> ApiError:
    """Return the 503 of a server that is stopping."""
    return unavailable("the server is shutting down", "shutting_down")


def internal(message: str = "internal server error") -> ApiError:
    """Return a 500."""
    return ApiError(500, message, type="server_error", code="internal_error")


_BAD_FORM = "the grammar cannot be followed"
"""How the core's message begins; see `rust/core/src/grammar/limits.rs`."""


def engine_failure(
    engine: Engine, message: str | None, form_param: str = "structured_outputs"
) -> ApiError:
    """Return the error of a request that the engine failed: 503 if the engine itself is dead.

    A form of answers that shows only while it is followed that it cannot be is the request's fault:
    that of `form_param`.
    """
    if engine.is_healthy:
        if message is not None and message.startswith(_BAD_FORM):
            return invalid(form_param, message)
        return internal(message or "the engine failed this request")
    return unavailable(engine.error or message or "the engine is dead", "engine_dead", retry=False)


def from_value_error(error: ValueError, param: str | None = None) -> ApiError:
    """Return the 400 for a refusal by the engine or the sampling parameters.

    A `ParameterError` and a `RequestError` name the parameter in `param`; `param` here is the name
    that the request has for it, if that is another, and goes into the message too.
    """
    message, own = str(error), getattr(error, "param", None)
    if param is not None and own is not None:
        message = re.sub(rf"^{re.escape(own)}\b(\.\w+)*", param, message)
    return ApiError(400, message, param=param or own)


def from_http_exception(error: web.HTTPException, method: str, path: str) -> ApiError:
    """Return aiohttp's own refusals (404, 405, 413, ...) in the JSON shape."""
    headers = {}
    if isinstance(error, web.HTTPNotFound):
        message, code = f"no such route: {method} {path}", "route_not_found"
        if "/v1/v1/" in path:
            message += "; leave /v1 out of the base URL, the client adds it"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message, code = f"{path} takes {allowed}, not {method}", "method_not_allowed"
        headers["Allow"] = allowed
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = error.text or error.reason, "request_too_large"
    else:
        message, code = error.text or error.reason, "http_error"
    return ApiError(error.status, message, code=code, headers=headers)
