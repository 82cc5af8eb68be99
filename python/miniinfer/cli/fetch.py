"""`miniinfer fetch`: have the built-in model on disk."""

from __future__ import annotations

import argparse

from .options import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "fetch",
        help="download the built-in model",
        description="Download the built-in model, unless it is there, and print its path.",
    )
    parser.add_argument("--verify", action="store_true", help="check every byte of the file")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the path")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model and print where it is."""
    from miniinfer.fetch import ensure_builtin, verify_builtin

    path = ensure_builtin(progress=not arguments.quiet)
    if arguments.verify:
        path = verify_builtin()
    print(path)
    return 0
