"""Finds the fastest launches of the attention on this machine, and writes them where they are read.

`python -m miniinfer.kernels.autotune --head-dim 128 --group 4` tries tiles, warps and stages for a
model's decodes and prefills; `--table` says into which file, by default the one that is read.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _launch
from ._measure import attention_case, seconds
from .paged_attention import paged_attention

DECODE_CHOICES = {
    "TILE_Q": (64,),
    "TILE_K": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 5, 7),
}
PREFILL_CHOICES = {
    "TILE_Q": (64, 128),
    "TILE_K": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 5),
}


@dataclass(frozen=True)
class Load:
    """What is timed."""

    requests: list[tuple[int, int]]
    """Pairs of queries and context."""
    kv_heads: int


DECODE_LOAD = Load([(1, 4096)] * 32, 8)
PREFILL_LOAD = Load([(2048, 2048), (1024, 4096)], 8)


def candidates(choices: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """Every combination of the choices."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def tune(
    shape: _launch.AttentionShape,
    load: Load,
    choices: dict[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, int]:
    """The fastest launch of a shape over a load; prints what it tries.

    RuntimeError if none of the choices runs.
    """
    case = attention_case(
        device,
        requests=load.requests,
        heads=load.kv_heads * shape.group,
        kv_heads=load.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        fp8=shape.bytes_per_key == 1,
    )
    name = _launch.traits_of(device).name
    best: tuple[float, dict[str, int]] | None = None
    for options in candidates(choices):
        with _launch.trial(name, shape.key, options):
            taken = _time(case, device)
        print(f"{shape.key}: {options}: {'-' if taken is None else f'{taken * 1e6:.0f} us'}")
        if taken is not None and (best is None or taken < best[0]):
            best = taken, options
    if best is None:
        raise RuntimeError(f"no launch of {shape.key} runs on {name}")
    return best[1]


def _time(case: dict[str, Any], device: torch.device) -> float | None:
    """Seconds; None if the launch asks for more than the device has, or does not compile."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return seconds(lambda: paged_attention(**case), device, repeats=10)
    except (OutOfResources, CompilationError, PTXASError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miniinfer.kernels.autotune",
        description="Find the fastest launches of the attention on the GPU of this machine.",
    )
    parser.add_argument(
        "--head-dim",
        type=int,
        nargs="+",
        default=[64, 128],
        metavar="N",
        help="head sizes to tune for (default: 64 128)",
    )
    parser.add_argument(
        "--group",
        type=int,
        nargs="+",
        default=[4, 8],
        metavar="N",
        help="query heads that share a key-value head (default: 4 8)",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="for a cache of 8 bits (default: of 16 bits)"
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help=f"where to write what is found (default: {_launch.table_path()}, which is read)",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Tune and write the table."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    tune_all(options.head_dim, options.group, options.fp8, options.table or _launch.table_path())


def tune_all(
    head_dims: list[int],
    groups: list[int],
    fp8: bool,
    table: Path,
    *,
    device: torch.device | None = None,
    loads: tuple[Load, Load] = (DECODE_LOAD, PREFILL_LOAD),
    choices: tuple[dict[str, tuple[int, ...]], ...] = (DECODE_CHOICES, PREFILL_CHOICES),
) -> None:
    """Tune decodes and prefills of every head size and group, writing each as it is found."""
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    for head_dim, group, kind in itertools.product(head_dims, groups, (0, 1)):
        shape = _launch.AttentionShape(head_dim, group, 2, 1 if fp8 else 2, is_decode=kind == 0)
        found = tune(shape, loads[kind], choices[kind], device, torch.bfloat16)
        _launch.write_table(table, _launch.traits_of(device).name, {shape.key: found})


if __name__ == "__main__":
    main()
