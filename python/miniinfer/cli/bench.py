"""`miniinfer bench core`: what the control plane costs on this machine, without a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .options import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="measure the control plane, without a model",
        description=(
            "Measure scheduling, admission and cancelling as Python sees them, beside a scheduler "
            "of the same semantics in plain Python. Takes about a minute."
        ),
    )
    parser.add_argument("subject", choices=["core"], help="what to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from miniinfer.bench.core import measure, table

    core, python = measure()
    print(table(core, python))
    if arguments.json is not None:
        figures = core | {f"python_scheduler_{name}": value for name, value in python.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0
