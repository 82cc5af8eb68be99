"""GET /openapi.json: the routes as an OpenAPI 3.1 document, made of the types that they use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from miniinfer import __version__

from .responses import encode
from .route import Route

_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_REQUEST_ID = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
_RETRY_AFTER = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}

_COMPONENTS = {
    "headers": {
        "RequestId": {
            "description": "The id that the request sent under this name, or a new one.",
            "schema": {"type": "string"},
        },
        "RetryAfter": {
            "description": "Seconds to wait, when waiting helps.",
            "schema": {"type": "integer"},
        },
    },
    "securitySchemes": {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    },
}


class OpenApi:
    """The description of a server's routes; `keys` says whether it asks for one."""

    def __init__(self, routes: Sequence[Route], *, keys: bool) -> None:
        self._routes = routes
        self._keys = keys

    @cached_property
    def body(self) -> bytes:
        """The document as JSON; made when first wanted, which takes some milliseconds."""
        return encode(self.document())

    def document(self) -> dict[str, Any]:
        """Return the document."""
        named = list(dict.fromkeys(_named_types(self._routes)))
        schemas, components = msgspec.json.schema_components(
            named, ref_template="#/components/schemas/{name}"
        )
        by_type = dict(zip(named, schemas, strict=True))
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            path = _PARAMETER.sub(r"{\1}", route.path)
            paths.setdefault(path, {})[route.method.lower()] = self._operation(route, by_type)
        return {
            "openapi": "3.1.0",
            "info": {"title": "miniinfer", "version": __version__},
            "paths": paths,
            "components": {**_COMPONENTS, "schemas": components},
        }

    def _operation(self, route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path)}",
            "responses": self._responses(route, schemas),
        }
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(route.path)
        ]
        if parameters:
            operation["parameters"] = parameters
        if route.body is not None:
            content = {"application/json": {"schema": schemas[route.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        if route.needs_key:
            either: list[dict[str, list[str]]] = [{"bearer": []}, {"header": []}]
            operation["security"] = either if self._keys else [{}, *either]
        return operation

    def _responses(self, route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
        error = {"application/json": {"schema": schemas[route.error]}}
        # An error that is not named is one of the server's own.
        responses = {"default": _response("An error.", error)}
        for status in (401, 503, *route.errors) if route.needs_key else route.errors:
            responses[str(status)] = _response(HTTPStatus(status).phrase, error)
        for status, answer in route.answers.items():
            content = _content(answer, schemas)
            if status == HTTPStatus.OK and route.events is not None:
                # One `data:` line each, which no JSON schema can describe.
                events = {"schema": {"type": "string"}, "x-event": schemas[route.events]}
                content["text/event-stream"] = events
            responses[str(status)] = _response(HTTPStatus(status).phrase, content)
        for busy in ("429", "503"):
            if busy in responses:
                responses[busy]["headers"] |= _RETRY_AFTER
        return responses


OPENAPI: web.AppKey[OpenApi] = web.AppKey("openapi", OpenApi)


async def openapi_document(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=request.app[OPENAPI].body, content_type="application/json")


def _named_types(routes: Sequence[Route]) -> list[Any]:
    """Return every type whose schema a route needs."""
    types: list[Any] = []
    for route in routes:
        types += [route.error, *route.answers.values()]
        types += [kind for kind in (route.body, route.events) if kind is not None]
    return [kind for kind in types if kind is not None and kind is not str]


def _content(answer: Any, schemas: dict[Any, Any]) -> dict[str, Any]:
    if answer is None:
        return {}
    if answer is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": schemas[answer]}}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": description, "headers": dict(_REQUEST_ID)}
    if content:
        response["content"] = content
    return response
