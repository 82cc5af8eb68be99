"""A running server as the source of answers, over the standard library alone."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self

from miniinfer.server_failures import refusal, unreachable

from .client_options import split_url

_CONNECT_TIMEOUT_SECONDS = 10.0


class HttpBackend:
    """Talks to `/v1/chat/completions` of an OpenAI-compatible server.

    As a context it is there to be entered only if the server can be reached; RuntimeError says why
    it cannot.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        api_key: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._parts = parts = split_url(url)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model
        self._tls = tls

    def __enter__(self) -> Self:
        if self._model is None:
            self._first_model()
        else:
            # No request: a server need not list its models to one who knows them.
            self._connected().close()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Generator[str]:
        """Yield the answer to a conversation; closing the connection early cancels it."""
        body = {"messages": messages, "stream": True, "model": self._model or self._first_model()}
        connection, response = self._request("POST", "/v1/chat/completions", body | options)
        try:
            yield from _contents(response)
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models", None)
        try:
            self._model = str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            where = f"{self._parts.netloc}{self._base}/v1/models"
            raise RuntimeError(f"{where} lists no model; name one") from error
        finally:
            connection.close()
        return self._model

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connected()
        try:
            connection.sock.settimeout(None)  # An answer may take as long as it takes.
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(refusal(response.status, response.reason, response.read()))
        except OSError as error:
            connection.close()
            raise RuntimeError(unreachable(self._parts.netloc, error)) from error
        except http.client.HTTPException as error:
            connection.close()
            reason = f"it does not answer in HTTP ({type(error).__name__})"
            raise RuntimeError(f"cannot talk to {self._parts.netloc}: {reason}") from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _connected(self) -> http.client.HTTPConnection:
        connection = self._connection()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise RuntimeError(unreachable(self._parts.netloc, error)) from error
        return connection

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname, self._parts.port
        assert host is not None, "checked at construction"
        timeout = _CONNECT_TIMEOUT_SECONDS
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=timeout)


def _contents(response: http.client.HTTPResponse) -> Generator[str]:
    """Yield the text of each event until `[DONE]`."""
    for data in _events(response):
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                yield content
    raise RuntimeError("the server closed the stream before its end")


def _events(lines: Iterable[bytes]) -> Generator[bytes]:
    """Yield the data of each event: its `data` lines up to an empty one, as WHATWG has it."""
    data: list[bytes] = []
    for line in lines:
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            data.append(text[len(b"data:") :].removeprefix(b" "))
        elif not text and data:
            yield b"\n".join(data)
            data = []
