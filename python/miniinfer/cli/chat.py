"""`miniinfer chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from .client_options import add_tls_options, tls_context
from .options import (
    API_KEY_VARIABLE,
    Subparsers,
    UsageError,
    add_engine_options,
    add_sampling_options,
    api_key_from_environment,
    engine_args,
    given_engine_flags,
    sampling_fields,
)

if TYPE_CHECKING:
    from .backend import Backend


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal, or to a running server with --url. "
        "Input that is piped in is taken line by line, each line a message.",
    )
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=None)
    parser.add_argument("--system", metavar="TEXT", help="system message to start with")
    parser.add_argument("--url", help="a running server, as http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key, or set {API_KEY_VARIABLE}"
    )
    add_tls_options(parser)
    parser.set_defaults(run=run, log_level="warning")


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    from .repl import Repl

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()

    interactive = sys.stdin.isatty()
    options = sampling_fields(arguments)
    if interactive and arguments.url is None:
        print(f"Loading {arguments.model or 'the built-in model'}.", file=sys.stderr, flush=True)
    with _backend(arguments) as backend:
        repl = Repl(backend, options, system=arguments.system, interactive=interactive)
        return repl.run()


def _backend(arguments: argparse.Namespace) -> Backend:
    if arguments.url is not None:
        if flags := given_engine_flags(arguments):
            raise UsageError(
                f"{', '.join(flags)} cannot be set with --url: the server's engine is running"
            )
        from .http_backend import HttpBackend

        key = arguments.api_key or api_key_from_environment()
        tls = tls_context(arguments)
        return HttpBackend(arguments.url, model=arguments.model, api_key=key, tls=tls)

    from .backend import LocalBackend
    from .logs import set_up_logging

    set_up_logging(arguments.log_level)
    return LocalBackend(engine_args(arguments), arguments.chat_template)
