"""What the commands that talk to a server say when it cannot be reached or refuses."""

from __future__ import annotations

import json
import os
import socket
import ssl

__all__ = ["refusal", "unreachable"]


def unreachable(address: str, error: Exception) -> str:
    """Return why there is no connection to a server, `host:port`, from what a socket raised."""
    return f"cannot reach the server at {address}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; --cacert FILE trusts it, --insecure does not verify"
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    # The numbers of these two are not the system's. asyncio puts words of its own for the others'.
    if error.errno is not None and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def refusal(status: int, reason: str | None, body: bytes) -> str:
    """Return the server's own words of an answer that is an error, if it has any."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {status} {reason or ''}".rstrip()
    if status == 401:
        return f"{message} (here --api-key KEY, or MINIINFER_API_KEY)"
    return message
