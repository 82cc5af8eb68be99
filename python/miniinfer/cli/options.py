"""Flags that several commands share, and the values they hold."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from miniinfer.chat_template import ChatTemplate, ChatTemplateError
from miniinfer.parallel.torchrun import torchrun

from .flags import long_flags

if TYPE_CHECKING:
    from miniinfer.config import EngineArgs

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

API_KEY_VARIABLE = "MINIINFER_API_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi|)b?", re.IGNORECASE)


_ENGINE_SETTINGS = (
    "tokenizer",
    "revision",
    "dtype",
    "quantization",
    "load_format",
    "attention_backend",
    "async_scheduling",
    "enforce_eager",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "target_itl_ms",
    "speculative_config",
    "threads",
)
"""Settings of the engine that are called as their flags, but for those that requests have too."""


class UsageError(Exception):
    """The command line makes no sense; the message says what to change."""


class Parser(argparse.ArgumentParser):
    """Answers wrong usage in one line: the flags of `serve` alone would fill a screen."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help explains)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse words that are not known here: argparse would leave that to the first parser,
        which knows neither the command nor its flags."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments, unknown


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def byte_size(text: str) -> int:
    """Parse a size such as 800M, 2GiB or 1000000 to bytes."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 800M or 2GiB, got {text!r}")
    return size


def _target(text: str) -> float | str | None:
    """Parse milliseconds, auto or none."""
    if text in ("auto", "none"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError:
        message = f"must be milliseconds, auto or none, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def template_text(value: str) -> str:
    """Return a chat template given as a file's path or as its own text."""
    text = value if "{{" in value or "{%" in value else _template_file(value)
    try:
        ChatTemplate.of(text)
    except ChatTemplateError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _template_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise argparse.ArgumentTypeError(f"cannot read the template {path!r}: {reason}") from None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and everything that shapes the engine."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a model directory, a .gguf file or a hub id; default: the built-in model",
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", metavar="PATH", help="take the tokenizer from here instead")
    group.add_argument("--revision", help="revision of a hub model")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of weights and activations (default: auto)",
    )
    _add_kernel_options(group)
    _add_execution_options(group)
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: auto)")
    group.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=positive_int,
        metavar="N",
        help="processes that split the model's weights, each on a device of its own "
        "(default: as many as torchrun has started, else 1)",
    )
    group.add_argument(
        "--max-model-len",
        type=positive_int,
        metavar="N",
        help="tokens a request may have, prompt and answer together (default: the model's)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=256,
        metavar="N",
        help="requests that may run at once (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        metavar="N",
        help="tokens computed in one step (default: 512 on a CPU, else 2048)",
    )
    group.add_argument(
        "--target-itl-ms",
        type=_target,
        default="auto",
        metavar="MS",
        help="keep steps this short by taking prompts in smaller pieces while others wait for "
        "tokens, or none (default: 250 on a CPU, else none)",
    )
    group.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="draft tokens from what a request quotes and verify several in a step, as "
        '{"method": "ngram", "num_speculative_tokens": 4}; prompt_lookup_max (4) and '
        "prompt_lookup_min (2) say how many tokens must occur again (default: no drafts)",
    )
    _add_memory_options(parser)
    group.add_argument("--seed", type=int, metavar="N", help="seed for requests without one")
    group.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="CPU threads for torch (default: torch's choice, one a core)",
    )
    parser.add_argument(
        "--chat-template",
        type=template_text,
        metavar="FILE",
        help="chat template that replaces the model's: a file or the template itself",
    )
    parser.add_argument(
        "--log-level", default="info", choices=LOG_LEVELS, help="(default: %(default)s)"
    )


def _add_kernel_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quantization",
        default="auto",
        choices=("auto", "none", "int8", "int4"),
        help="on a CPU: auto keeps GGUF weights quantised, none makes floats of them, int8 and "
        "int4 quantise any model (default: %(default)s)",
    )
    group.add_argument(
        "--attention-backend",
        default="auto",
        choices=("auto", "triton", "torch", "cpu", "flash_attn", "flashinfer"),
        help="what computes attention: the package's kernels for GPUs (triton) or CPUs (cpu), "
        "torch, or an installed package; auto is triton on a GPU, cpu on a CPU, and torch where "
        "they do not run (default: %(default)s)",
    )
    group.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy takes random weights, to measure with (default: %(default)s)",
    )


def _add_execution_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan each step while the one before it runs (default: on a GPU)",
    )
    group.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--block-size",
        type=positive_int,
        default=16,
        metavar="N",
        help="tokens in one KV block (default: %(default)s)",
    )
    size = group.add_mutually_exclusive_group()
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"),
        help="type of cached keys and values; int8 on a CPU only (default: float16 beside "
        "quantised weights, else that of the model)",
    )
    size.add_argument("--num-kv-blocks", type=positive_int, metavar="N", help="number of blocks")
    size.add_argument(
        "--kv-cache-memory",
        type=byte_size,
        metavar="SIZE",
        help="memory for blocks, as 2GiB (default: a share of the free memory, on a GPU what "
        "--gpu-memory-utilization leaves)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a GPU's memory that weights, steps and KV cache may take together "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not keep the KV blocks of past prompts",
    )


def engine_args(arguments: argparse.Namespace) -> EngineArgs:
    """Return the engine's settings; raises `UsageError` for values that exclude each other."""
    from miniinfer.config import EngineArgs

    names: tuple[str, ...] = ("model", "seed", *_ENGINE_SETTINGS)
    if hasattr(arguments, "step_timeout"):
        names += ("max_backlog", "stall_limit", "step_timeout")
    values = {name: getattr(arguments, name) for name in names}
    try:
        launch = torchrun()
        size = arguments.tensor_parallel_size
        if size is None:
            size = 1 if launch is None else launch.size
        return EngineArgs(tensor_parallel_size=size, **values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def given_engine_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that shape an engine and were given another value than their default."""
    parser = arguments.command
    flags = long_flags(parser)
    return [
        flags[name]
        for name in (*_ENGINE_SETTINGS, "tensor_parallel_size", "chat_template")
        if getattr(arguments, name) != parser.get_default(name)
    ]


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add how an answer is sampled and how long it may be."""
    group = parser.add_argument_group("answer")
    default = "the rest of the context" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        default=max_tokens,
        metavar="N",
        help=f"tokens to generate at most (default: {default})",
    )
    group.add_argument("--temperature", type=float, help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, help="sample from this share of probability")
    group.add_argument("--top-k", type=int, help="sample from this many tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end here; repeatable")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling flags that were given, under the names requests use.

    Raises `UsageError` for values out of range: here, since loading the model takes seconds.
    """
    from miniinfer.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: getattr(arguments, name) for name in names}
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**fields)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return fields


def api_keys_from_environment() -> list[str]:
    """Return the keys in `MINIINFER_API_KEY`, which commas or white space part."""
    return os.environ.get(API_KEY_VARIABLE, "").replace(",", " ").split()


def api_key_from_environment() -> str | None:
    """Return the first key in `MINIINFER_API_KEY`, for a client."""
    return next(iter(api_keys_from_environment()), None)
