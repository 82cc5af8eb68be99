"""The command line: `miniinfer serve | chat | generate | fetch | bench`.

Each command is a module with `add_parser` and `run`. They import what is heavy inside `run`, so
`miniinfer --help` needs neither torch nor aiohttp.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from miniinfer.parallel.torchrun import torchrun
from miniinfer.spinning import spin_briefly

from . import bench, chat, fetch, generate, serve
from .flags import with_flags
from .logs import set_up_logging
from .options import Parser, UsageError, engine_args

_COMMANDS = (serve, chat, generate, fetch, bench)


class _Version(argparse.Action):
    """Prints the version; read only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from miniinfer import __version__

        print(f"miniinfer {__version__}")
        parser.exit(0)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; a parsed command has its function in `run`
    and its parser in `command`."""
    parser = Parser(
        prog="miniinfer",
        description="Serve a large language model, or use one here and now.",
        epilog="Without a model, the small built-in one is used (fetched on first use).",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    for command_parser in commands.choices.values():
        command_parser.set_defaults(command=command_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 well, 1 failed, 2 wrong usage, 130 Ctrl-C.

    A failure is one line on stderr; `--log-level debug` shows where it came from.
    """
    arguments = build_parser().parse_args(argv)
    spin_briefly()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter's own flush must not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        return _fail(with_flags(str(error), arguments.command), 2)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if getattr(arguments, "log_level", None) == "debug":
            raise
        return _fail(with_flags(str(error), arguments.command) or type(error).__name__, 1)
    return code


def _run(arguments: argparse.Namespace) -> int:
    """Run the command, unless torchrun started this process to compute for another one's."""
    if hasattr(arguments, "prepare"):
        arguments.prepare(arguments)
    if hasattr(arguments, "tensor_parallel_size") and not getattr(arguments, "dry_run", False):
        args = engine_args(arguments)
        launch = torchrun()
        if launch is not None and launch.rank > 0:
            set_up_logging(arguments.log_level)
            from miniinfer.parallel.follower import follow_torchrun

            follow_torchrun(args, launch)
    code: int = arguments.run(arguments)
    return code


def _fail(message: str, code: int) -> int:
    print(f"miniinfer: error: {' '.join(message.split())}", file=sys.stderr)
    return code
