"""Read a JSON body into a typed struct, with an error that names the place."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from .errors import ApiError
from .state import STATE

Body = TypeVar("Body", bound=msgspec.Struct)

_LOCATED = re.compile(r"^(?P<what>.*?)(?: - at (?:key in )?`(?P<path>[^`]*)`)?$", re.DOTALL)

# Escapes of which the group is half of a pair that has no other half.
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_HAS_NO_NUMBER = re.compile(rb"[:,\[\s-](?:NaN|Infinity)\b")


async def read_body(request: web.Request, body_type: type[Body]) -> Body:
    """Decode the request's JSON body; any Content-Type is taken as JSON.

    Raises `ApiError` 400 for JSON that is malformed, nested too deeply or of the wrong types
    (NaN and Infinity are not JSON), 408 for one that does not arrive. A body over the size limit
    raises aiohttp's 413.
    """
    limit = request.app[STATE].config.body_timeout
    try:
        async with asyncio.timeout(limit):
            raw = await request.read()
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {limit:g} s (--body-timeout)",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    except (aiohttp.ClientError, web.RequestPayloadError) as error:
        _give_up(request)
        cause = error.__cause__
        reason = cause.message if isinstance(cause, HttpProcessingError) else error
        raise ApiError(
            400,
            f"cannot read the body: {reason}",
            code="invalid_body",
            headers={"Connection": "close"},
        ) from error
    return decode_body(raw, body_type)


def _give_up(request: web.Request) -> None:
    """Keep aiohttp from reading the rest of a broken body, and from expecting a request behind it.

    It would wait for the body's end after the answer, and fail with the same error.
    """
    request.content.feed_eof()
    request.protocol.close()


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """Decode bytes as JSON of the given type; see `read_body`."""
    if not raw.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        # The decoder skips unknown fields without looking at their bytes.
        str(raw, "utf-8")
        body: Body = _decoder(body_type).decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_json") from error
    except msgspec.DecodeError as error:
        message = f"the body is not valid JSON: {_malformed(raw, error)}"
        raise ApiError(400, message, code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    return body


def _malformed(raw: bytes, error: msgspec.DecodeError) -> str:
    halves = (match for match in _SURROGATES.finditer(raw) if match[1])
    if half := next(halves, None):
        return f"{half[1].decode()} at byte {half.start()} is half of a surrogate pair alone"
    hint = "; JSON has no NaN and no Infinity" if _HAS_NO_NUMBER.search(raw) else ""
    return f"{error}{hint}"


@functools.cache
def _decoder(body_type: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body_type)


def _wrong_type(error: msgspec.ValidationError) -> ApiError:
    """Turn "Expected `int`, got `str` - at `$.n`" into a 400 for the parameter n."""
    located = _LOCATED.match(str(error))
    what, path = (located["what"], located["path"]) if located else (str(error), None)
    what = what.replace("`", "")
    what = what[:1].lower() + what[1:]
    place = (path or "").removeprefix("$").removeprefix(".")
    param = re.split(r"[.\[]", place)[0] or None
    if param is None and (missing := re.search(r"missing required field (\w+)", what)):
        param = place = missing[1]
    message = f"{place or 'the body'}: {what}"
    return ApiError(400, message, param=param, code="invalid_type")
