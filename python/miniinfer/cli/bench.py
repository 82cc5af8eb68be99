"""`miniinfer bench`: the control plane, the engine without a server, a server under load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .client_options import add_tls_options, output_file, split_url, tls_context
from .options import (
    Subparsers,
    UsageError,
    add_engine_options,
    api_key_from_environment,
    engine_args,
    json_object,
    positive_int,
)


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="measure the control plane, the engine, or a server",
        description="Measure the control plane, the engine, or a server under load.",
    )
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    _add_core(subjects)
    _add_offline(subjects)
    _add_serve(subjects)


def _add_core(subjects: Subparsers) -> None:
    parser = subjects.add_parser(
        "core",
        help="scheduling and admission, without a model",
        description=(
            "Measure scheduling, admission and cancelling as Python sees them, beside a scheduler "
            "of the same semantics in plain Python. Takes about ten seconds."
        ),
    )
    _add_outputs(parser)
    parser.set_defaults(run=run_core)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        "--output",
        type=output_file,
        metavar="FILE",
        help="write the figures there too",
    )
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a page with charts there"
    )


def _add_numbers(
    parser: argparse.ArgumentParser, kind: Callable[[str], int], *flags: tuple[str, int, str]
) -> None:
    """Add flags that take a number: name, default and meaning of each."""
    for name, default, text in flags:
        parser.add_argument(
            name,
            type=kind,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )


def _add_offline(subjects: Subparsers) -> None:
    parser = subjects.add_parser(
        "offline",
        help="throughput and latency of a model, without a server",
        description=(
            "Generate for batches of random prompts, each batch submitted at once, and report "
            "rates, times to first token, between tokens and end to end."
        ),
    )
    add_engine_options(parser)
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=positive_int,
        default=(1, 8, 32),
        metavar="N",
        help="requests at once (default: 1 8 32)",
    )
    _add_numbers(
        parser,
        positive_int,
        ("--input-tokens", 128, "tokens of a prompt"),
        ("--max-tokens", 64, "tokens of an answer"),
        ("--rounds", 3, "batches of each size that count, behind one that does not"),
    )
    _add_outputs(parser)
    parser.set_defaults(run=run_offline, log_level="warning")


def _add_serve(subjects: Subparsers) -> None:
    parser = subjects.add_parser(
        "serve",
        help="a server that speaks OpenAI's API, under load",
        description=(
            "Send streams to a server that speaks OpenAI's API, and report times to first token, "
            "between tokens and end to end. --rate sends as users do, whether the server keeps up "
            "or not; --concurrency waits for answers."
        ),
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the server, without /v1 (default: %(default)s)",
    )
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="(default: chat)"
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", metavar="KEY", help="or set MINIINFER_API_KEY")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="N", help="requests a second, Poisson arrivals")
    load.add_argument(
        "--concurrency", type=positive_int, metavar="N", help="clients at once (default: 8)"
    )
    _add_numbers(
        parser,
        positive_int,
        ("--num-requests", 100, "requests to measure"),
        ("--input-words", 128, "words of a random prompt, about a token each"),
        ("--max-tokens", 64, "tokens of an answer at most"),
    )
    _add_numbers(
        parser,
        int,
        ("--num-warmup", 4, "requests ahead of those, not counted"),
        ("--shared-words", 0, "words that all random prompts begin with"),
        ("--seed", 0, "of prompts and arrivals"),
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one a line; of a .jsonl file objects with prompt or messages",
    )
    parser.add_argument(
        "--extra-body",
        type=json_object,
        metavar="JSON",
        help="more fields for every request, as '{\"ignore_eos\": true}'",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for one request (default: %(default)g)",
    )
    add_tls_options(parser)
    _add_outputs(parser)
    parser.set_defaults(run=run_serve)


def run_core(arguments: argparse.Namespace) -> int:
    """Print the table of the control plane."""
    from miniinfer.bench.core import measure, page, table

    core, python = measure()
    print(table(core, python))
    figures = core | {f"python_scheduler_{name}": value for name, value in python.items()}
    _write(arguments, figures, lambda: page(core, python))
    return 0


def run_offline(arguments: argparse.Namespace) -> int:
    """Print the table of the engine; 1 if a request failed."""
    from miniinfer.bench.offline import OfflineSettings, measure, page, table

    from .logs import set_up_logging

    set_up_logging(arguments.log_level)
    settings = OfflineSettings(
        batches=arguments.batch_sizes,
        input_tokens=arguments.input_tokens,
        max_tokens=arguments.max_tokens,
        rounds=arguments.rounds,
        seed=arguments.seed or 0,
    )
    found = measure(engine_args(arguments), settings)
    print(table(found))
    _write(arguments, {str(batch): each for batch, each in found.items()}, lambda: page(found))
    return 1 if any(each["errors"] for each in found.values()) else 0


def _write(arguments: argparse.Namespace, figures: dict[str, Any], page: Callable[[], str]) -> None:
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(page(), encoding="utf-8")


def run_serve(arguments: argparse.Namespace) -> int:
    """Print the table of a server; 1 if no request succeeded."""
    import asyncio

    from miniinfer.bench.serve import LoadSettings, run_load
    from miniinfer.bench.serve_plot import page
    from miniinfer.bench.serve_report import figures, table

    concurrency = arguments.concurrency
    if arguments.rate is None and concurrency is None:
        concurrency = 8
    names = (
        *("endpoint", "model", "num_requests", "num_warmup", "rate", "prompts", "input_words"),
        *("shared_words", "max_tokens", "extra_body", "seed", "timeout"),
    )
    try:
        settings = LoadSettings(
            url=split_url(arguments.url).geturl().rstrip("/").removesuffix("/v1"),
            tls=tls_context(arguments),
            api_key=arguments.api_key or api_key_from_environment(),
            concurrency=concurrency,
            **{name: getattr(arguments, name) for name in names},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    run = asyncio.run(run_load(settings))
    found = figures(run)
    print(table(found))
    _write(arguments, found, lambda: page(run, found))
    return 0 if found["succeeded"] else 1
