"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from .errors import ApiError

PATH = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; what is not here is an `api_error`."""


_ENDINGS = ("/messages", "/messages/count_tokens")
"""Of the paths that clients of this API post to, whatever base URL they were given."""


def is_for_messages(request: web.Request) -> bool:
    """Whether a request is for this API, be it at a path that there is not."""
    path = request.path
    if request.method == "POST" and path.endswith(_ENDINGS):
        return True
    return path == PATH or path.startswith(PATH + "/")


class MessagesErrorFields(msgspec.Struct, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct, tag_field="type", tag="error", kw_only=True):
    """The body of every answer that is an error, and the event of one within a stream."""

    error: MessagesErrorFields
    request_id: str | None


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    """Return the JSON of an error."""
    fields = MessagesErrorFields(type=_TYPES.get(error.status, "api_error"), message=error.message)
    return msgspec.json.encode(MessagesError(error=fields, request_id=request_id))


def error_response(error: ApiError, request_id: str) -> web.Response:
    """Return an error as a whole HTTP answer."""
    return web.Response(
        status=error.status,
        body=error_body(error, request_id),
        content_type="application/json",
        headers=error.headers,
    )
