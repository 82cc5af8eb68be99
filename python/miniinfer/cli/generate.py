"""`miniinfer generate`: print the continuation of a prompt as it is made."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

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
    parser.add_argument(
        "text", nargs="?", metavar="prompt", help="the prompt; alone, it needs no model before it"
    )
    parser.add_argument("-p", "--prompt", help="the same as a flag; - reads stdin in both places")
    parser.add_argument(
        "--chat", action="store_true", help="take the prompt as a user's message to answer"
    )
    parser.set_defaults(run=run, prepare=tell_words_apart, log_level="warning")


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


def tell_words_apart(arguments: argparse.Namespace) -> None:
    """Set which model is to continue what: a word that stands alone is the prompt."""
    words = [word for word in (arguments.model, arguments.text) if word is not None]
    if arguments.prompt is not None:
        if len(words) > 1:
            raise UsageError(f"there are two prompts: --prompt, and {words[1]!r} behind the model")
        return
    if not words or (len(words) == 1 and words[0] and Path(words[0]).exists()):
        model = "".join(f"{word} " for word in words)
        raise UsageError(f"there is no prompt: miniinfer generate {model}'Once upon a time'")
    arguments.prompt = words.pop()
    arguments.model = words.pop() if words else None
