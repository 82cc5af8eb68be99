"""`miniinfer serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from typing import TYPE_CHECKING

from miniinfer.parallel.torchrun import torchrun

from .logs import LOG_FORMATS, set_up_logging
from .options import (
    Subparsers,
    UsageError,
    add_engine_options,
    engine_args,
    json_object,
    positive_int,
)
from .serve_options import add_limit_options, add_network_options, add_security_options, api_keys

if TYPE_CHECKING:
    from miniinfer.config import EngineArgs
    from miniinfer.processes import Processes
    from miniinfer.server.config import ServerConfig
    from miniinfer.server.engine_api import Engine

logger = logging.getLogger(__name__)

# Flags that are called as the settings are.
_SAME_NAMES = (
    "max_concurrent_requests",
    "max_queued_requests",
    "max_queued_tokens",
    "max_queued_requests_per_key",
    "max_queue_time",
    "max_connections",
    "max_header_size",
    "idle_timeout",
    "body_timeout",
    "keep_alive_interval",
    "shutdown_timeout",
    "tls_cert",
    "tls_key",
    "metrics_without_key",
    "share_prefix_cache",
    "otlp_traces_endpoint",
    "stats_interval",
    "access_log",
)

# Settings of the engine that the server has under its own names: its values count.
_SHOWN_OF_THE_SERVER = ("chat_template", "served_model_name", "stall_limit")


def add_parser(commands: Subparsers) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "serve",
        help="start an OpenAI-compatible server",
        description="Start an OpenAI-compatible server. Ctrl-C lets running requests finish.",
    )
    add_engine_options(parser)
    add_network_options(parser)
    add_security_options(parser)
    add_limit_options(parser)
    _add_chat_options(parser)
    _add_process_options(parser)
    parser.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="do not log each request",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="lines for people, or JSON objects for programs (default: %(default)s)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces there; needs opentelemetry-sdk and its OTLP exporter",
    )
    parser.add_argument(
        "--stats-interval",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="between lines of statistics while there is work; 0 is never (default: %(default)g)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all that a start needs but the model, print the settings and exit",
    )
    parser.set_defaults(run=run)


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models and chats")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests use for the model; default: the model's own",
    )
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes tool calls: hermes, qwen3_coder, llama3_json, mistral, "
        "pythonic, deepseek_v3, gpt_oss, none, or auto, which looks at the chat template and "
        "falls back on hermes (default: %(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes its reasoning: deepseek_r1, qwen3, gpt_oss, none to leave it "
        "in the content, or auto, which looks at the chat template (default: %(default)s)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables for the chat template, as '{\"enable_thinking\": false}'",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat template",
    )


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--layout",
        choices=("one", "two"),
        help="one process, or the engine in a process of its own (default: one)",
    )
    group.add_argument(
        "--api-processes",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes that answer HTTP, on one port; more than 1 implies layout two",
    )
    group.add_argument(
        "--engines",
        type=positive_int,
        default=1,
        metavar="N",
        help="engine processes, each with the whole model; more than 1 implies layout two",
    )
    group.add_argument(
        "--restart-engine",
        action="store_true",
        help="start an engine process again that died or hangs",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says stop."""
    engine = engine_args(arguments)
    config = server_config(arguments)
    several = max(arguments.api_processes, arguments.engines) > 1
    layout = _layout(arguments)
    if arguments.engines > 1 and torchrun() is not None:
        raise UsageError(
            f"--engines must be 1 where torchrun has started the processes, got {arguments.engines}"
        )
    processes = _processes(arguments, engine) if several else None
    if arguments.dry_run:
        from miniinfer.server.run import check

        check(config)
        shown = _shown(engine, config) | _shown_flags(arguments, layout)
        print(json.dumps(shown, indent=2, default=repr))
        return 0

    from miniinfer.server.run import serve

    def load() -> Engine:
        logger.info("loading %s", engine.model or "the built-in model")
        if layout == "two":
            from miniinfer.remote_llm import RemoteLLM

            return RemoteLLM.from_args(engine, restart=arguments.restart_engine)
        from miniinfer import AsyncLLM

        return AsyncLLM.from_args(engine)

    set_up_logging(arguments.log_level, arguments.log_format)
    if processes is not None:
        from miniinfer.processes import serve_processes

        return serve_processes(engine, config, processes)
    return serve(load, config)


def _layout(arguments: argparse.Namespace) -> str:
    """Return the layout that was asked for or is implied; raises `UsageError` if both differ."""
    counts = {"--api-processes": arguments.api_processes, "--engines": arguments.engines}
    several = [f"{flag} {count}" for flag, count in counts.items() if count > 1]
    if several and arguments.layout == "one":
        raise UsageError(f"--layout one excludes {' and '.join(several)}: that takes layout two")
    layout: str = arguments.layout or ("two" if several else "one")
    if arguments.restart_engine and layout == "one":
        raise UsageError("--restart-engine needs an engine process: add --layout two")
    return layout


def _processes(arguments: argparse.Namespace, engine: EngineArgs) -> Processes:
    from miniinfer.parallel.device_groups import device_groups
    from miniinfer.processes import Processes

    try:
        return Processes(
            arguments.api_processes,
            arguments.engines,
            restart_engines=arguments.restart_engine,
            devices=device_groups(engine, arguments.engines),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Return the server's settings; raises `UsageError` for values out of range."""
    from miniinfer.server.config import ServerConfig

    try:
        return ServerConfig(
            host=arguments.host,
            port=arguments.port,
            served_model_names=tuple(arguments.served_model_name),
            api_keys=tuple(api_keys(arguments)),
            allowed_origins=tuple(arguments.allowed_origins),
            default_chat_template_kwargs=arguments.default_chat_template_kwargs,
            chat_template=arguments.chat_template,
            tool_call_parser=arguments.tool_call_parser,
            reasoning_parser=arguments.reasoning_parser,
            trust_request_chat_template=arguments.trust_request_chat_template,
            max_body_size=arguments.max_body_size,
            stalled_client_timeout=arguments.stall_limit,
            **{name: getattr(arguments, name) for name in _SAME_NAMES},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _shown(engine: EngineArgs, config: ServerConfig) -> dict[str, object]:
    """Return the settings of engine and server for printing, each once; keys stay secret."""
    server = {name.name: getattr(config, name.name) for name in dataclasses.fields(config)}
    server["api_keys"] = [key.name or "***" for key in config.api_keys]
    shown = dataclasses.asdict(engine)
    for name in _SHOWN_OF_THE_SERVER:
        del shown[name]
    return {"engine": shown, "server": server}


def _shown_flags(arguments: argparse.Namespace, layout: str) -> dict[str, object]:
    """Return for printing what no settings object holds."""
    counts = {name: getattr(arguments, name) for name in ("api_processes", "engines")}
    return {
        "processes": {"layout": layout, **counts, "restart_engine": arguments.restart_engine},
        "logs": {"log_level": arguments.log_level, "log_format": arguments.log_format},
    }
