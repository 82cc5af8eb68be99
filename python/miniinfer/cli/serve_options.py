"""The flags of `serve` that say who may ask how much."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .options import (
    API_KEY_VARIABLE,
    UsageError,
    api_keys_from_environment,
    byte_size,
    positive_int,
)

if TYPE_CHECKING:
    from miniinfer.server.keys import ApiKey


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add where the server listens and what it expects of a connection."""
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 is any (default: %(default)s)")
    group.add_argument(
        "--max-connections",
        type=positive_int,
        metavar="N",
        help="refuse more open connections than this (default: as file descriptors allow)",
    )
    group.add_argument(
        "--max-header-size",
        type=byte_size,
        default=16 * 1024,
        metavar="SIZE",
        help="largest request line, and largest header (default: 16KiB)",
    )
    group.add_argument(
        "--max-body-size",
        type=byte_size,
        default=10 * 1024 * 1024,
        metavar="SIZE",
        help="largest request body (default: 10MiB)",
    )
    for name, default, text in (
        ("--idle-timeout", 75.0, "for a connection to send the headers of its next request"),
        ("--body-timeout", 60.0, "for a request to send its body"),
        ("--keep-alive-interval", 15.0, "silence after which a stream gets a comment; 0 is never"),
        ("--shutdown-timeout", 30.0, "for running requests after SIGTERM"),
    ):
        group.add_argument(
            name,
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)g)",
        )


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """Add who may ask."""
    group = parser.add_argument_group("security")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that clients must send; repeatable, or set {API_KEY_VARIABLE}",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="more keys, one a line, each with a name for the logs if written name:key",
    )
    group.add_argument(
        "--metrics-without-key", action="store_true", help="answer /metrics without a key"
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let API keys hit the cached prompts of others, which tells them what those were",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web origins that may call the server (CORS), or '*'; default: none",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate chain in PEM; serves HTTPS alone"
    )
    group.add_argument(
        "--tls-key", metavar="FILE", help="its private key, if it is not in the same file"
    )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add how much may be asked, and what is done about clients that do not read."""
    group = parser.add_argument_group("limits; by default there are none")
    group.add_argument(
        "--max-concurrent-requests",
        type=positive_int,
        metavar="N",
        help="refuse more requests than this at once with 503",
    )
    group.add_argument(
        "--max-queued-requests",
        type=positive_int,
        metavar="N",
        help="refuse requests with 429 while so many have no first token",
    )
    group.add_argument(
        "--max-queued-tokens",
        type=positive_int,
        metavar="N",
        help="refuse requests with 429 while those have so many prompt tokens",
    )
    group.add_argument(
        "--max-queued-requests-per-key",
        type=positive_int,
        metavar="N",
        help="the same for the requests of one API key",
    )
    group.add_argument(
        "--max-queue-time",
        type=float,
        metavar="SECONDS",
        help="end a request that has waited so long for its first token with 503",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="take the engine for dead if a step takes longer",
    )
    group.add_argument(
        "--max-backlog",
        type=positive_int,
        default=1024,
        metavar="N",
        help="tokens that may wait for a slow client before its request is paused "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--stalled-client-timeout",
        dest="stall_limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a request may wait for its client to read (default: %(default)g)",
    )


def api_keys(arguments: argparse.Namespace) -> list[ApiKey]:
    """Return the keys of the flags, or else of the environment; raises `UsageError`."""
    from miniinfer.server.keys import ApiKey, parse_key_file

    given: list[str] = arguments.api_key or []
    path: str | None = arguments.api_key_file
    if not given and path is None:
        given = api_keys_from_environment()
    try:
        keys = [ApiKey.of(key) for key in given]
        if path is not None:
            found = parse_key_file(Path(path).read_text(encoding="utf-8"))
            if not found:
                raise ValueError("it holds no key, and the server would be open to all")
            keys += found
    except OSError as error:
        raise UsageError(f"cannot read the API keys in {path!r}: {error.strerror}") from error
    except ValueError as error:
        where = "" if path is None else f"the API keys in {path!r}: "
        raise UsageError(f"{where}{error}") from error
    return keys
