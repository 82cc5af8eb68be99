"""`miniinfer generate`: print the continuation of a prompt as it is made."""

from __future__ import annotations

import argparse
import contextlib
import sys

from .options import (
    Subparsers,
    UsageError,
    add_engine_options,
    add_sampling_options,
    engine_args,
    sampling_fields,
)


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt and print the text as it is made.",
    )
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=256)
    parser.add_argument("-p", "--prompt", required=True, help="the prompt, or - to read stdin")
    parser.add_argument(
        "--chat", action="store_true", help="take the prompt as a user's message to answer"
    )
    parser.set_defaults(run=run, log_level="warning")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer to stdout."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise UsageError("the prompt is empty")
    engine = engine_args(arguments)
    options = sampling_fields(arguments)

    from .backend import LocalBackend
    from .logs import set_up_logging

    set_up_logging(arguments.log_level)
    with LocalBackend(engine, arguments.chat_template) as backend:
        if arguments.chat:
            pieces = backend.chat([{"role": "user", "content": prompt}], options)
        else:
            pieces = backend.complete(prompt, options)
        with contextlib.closing(pieces):
            for piece in pieces:
                print(piece, end="", flush=True)
    print()
    return 0
