"""Compiles every kernel for GPUs that need not be there, and says what each program uses.

`python -m miniinfer.kernels.compile_check` prints a table, `--json` the same for programs, and
`--write README.md` puts it into a document between its two marks.
"""

# Triton publishes no types.
# mypy: disable-error-code="no-untyped-call, unused-ignore"

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import (
    _kv_write,
    _paged_attention,
    _rms_norm,
    _rotary,
    _sample,
    _sample_logprobs,
    _silu_mul,
)
from ._fp8 import BITS, NATIVE, OFF
from ._launch import (
    AttentionShape,
    Traits,
    attention_options,
    tile_of_row,
    tile_of_scan,
    warps_of_row,
)

MARKS = ("<!-- compiled: python -m miniinfer.kernels.compile_check -->", "<!-- /compiled -->")
"""What stands around the table in a document."""

KIB = 1024
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Traits("A100", "cuda", 80, 163 * KIB, 108)),
    "sm_90": (GPUTarget("cuda", 90, 32), Traits("H100", "cuda", 90, 227 * KIB, 132)),
    "sm_100": (GPUTarget("cuda", 100, 32), Traits("B200", "cuda", 100, 227 * KIB, 148)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Traits("MI300X", "hip", 0, 64 * KIB, 304)),
}
"""The GPUs, with the shared memory that one program can have."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with its types and constants, as one launch would have them."""

    name: str
    kernel: str
    """Its place, as `module.function`."""
    types: dict[str, str]
    """Triton's names for what differs from `_TYPES`."""
    constants: dict[str, Any]
    """Arguments that are compiled in, `num_warps` and `num_stages` with them."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a program of a compiled kernel uses."""

    variant: str
    target: str
    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread that do not fit its registers."""
    shared: int
    """Bytes of shared memory."""


_TYPES = dict.fromkeys(("query_start", "seq_lens", "rows", "block_table", "positions"), "*i32")
_TYPES |= dict.fromkeys(("scale", "soft_cap", "eps"), "fp32")
_TYPES |= {"slot_mapping": "*i64", "cos": "*fp32", "sin": "*fp32"}
_TYPES |= dict.fromkeys(("key_scale", "value_scale", "part_sums", "part_stats"), "*fp32")
_SAMPLING = "values temperatures top_ps min_ps uniforms edit_repetition edit_bias logprobs"
_TYPES |= dict.fromkeys((*_SAMPLING.split(), "top_logprobs"), "*fp32")
_IDS = "bits packed_ids top_ks sampled edit_sample edit_token ranks top_ids"
_TYPES |= dict.fromkeys(_IDS.split(), "*i32") | {"bad": "*i1"}
_ACTIVATIONS = "query key value heads output x residual weight normed total gate_up"
_CACHES = ("key_cache", "value_cache")


def _typed(name: str) -> dict[str, str]:
    return dict.fromkeys((*_ACTIVATIONS.split(), *_CACHES), f"*{name}")


def _attention(
    traits: Traits, head_dim: int, group: int, *, queries: int, dtype: str = "bf16", fp8: int = OFF
) -> Variant:
    wide = dtype == "fp32"
    pairs = group * queries
    shape = AttentionShape(
        head_dim, group, 4 if wide else 2, 1 if fp8 else 4 if wide else 2, pairs <= 64
    )
    decode = queries == 1
    constants: dict[str, Any] = {
        "HEADS": 8 * group,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        # Gemma's layers have both; the rest neither.
        "HAS_WINDOW": head_dim == 256,
        "HAS_SOFT_CAP": head_dim == 256,
        "FP8": fp8,
        "ONE_TILE": decode,
        "SPLITS": 8 if decode else 1,
        "WIDEN": False,
        **attention_options(shape, traits, pairs),
    }
    if not fp8:
        constants |= {"key_scale": None, "value_scale": None}
    types = _typed(dtype) | (dict.fromkeys(_CACHES, _FP8_TYPES[fp8]) if fp8 else {})
    cache = "e4m3" if fp8 else dtype
    kind = "decode" if decode else "prefill"
    name = f"paged_attention {kind} d{head_dim} g{group} {dtype}/{cache}"
    return Variant(name, "_paged_attention.paged_attention_kernel", types, constants)


_FP8_TYPES = {NATIVE: "*fp8e4nv", BITS: "*u8"}


def variants(traits: Traits) -> list[Variant]:
    """What is compiled for a GPU."""
    fp8 = NATIVE if traits.capability >= 89 else BITS
    found = [
        _attention(traits, head_dim, group, queries=1)
        for head_dim, group in ((64, 8), (80, 1), (96, 1), (128, 4), (128, 8), (256, 2))
    ]
    found.append(_attention(traits, 128, 4, queries=1, dtype="fp16"))
    found.append(_attention(traits, 128, 4, queries=1, fp8=fp8))
    found += [_attention(traits, head_dim, 4, queries=512) for head_dim in (64, 80, 128, 256)]
    found.append(_attention(traits, 128, 4, queries=512, fp8=fp8))
    found.append(_attention(traits, 64, 4, queries=512, dtype="fp32"))
    join = {"HEADS": 32, "HEAD_DIM": 128, "SPLITS": 8, "TILE_S": 8, "TILE_D": 128, "num_warps": 1}
    found.append(
        Variant("join_splits", "_paged_attention.join_splits_kernel", _typed("bf16"), join)
    )
    tile = {"TILE": tile_of_row(1024)}
    scales = {"key_scale": None, "value_scale": None}
    write = "_kv_write.write_kv_kernel"
    found.append(Variant("write_kv bf16", write, _typed("bf16"), {"FP8": OFF, **tile, **scales}))
    caches = dict.fromkeys(_CACHES, _FP8_TYPES[fp8])
    found.append(
        Variant("write_kv bf16/e4m3", write, _typed("bf16") | caches, {"FP8": fp8, **tile})
    )
    row = {"HAS_RESIDUAL": True, "group": 1, "WIDTH": 4096, "num_warps": warps_of_row(4096)}
    found.append(Variant("add_rms_norm", "_rms_norm.rms_norm_kernel", _typed("bf16"), row))
    row = {"HAS_RESIDUAL": False, "WIDTH": 128, "num_warps": warps_of_row(128)}
    found.append(Variant("head_norm", "_rms_norm.rms_norm_kernel", _typed("bf16"), row))
    heads = {"HEADS": 32, "HALF": 64}
    for name, interleaved in (("halves", False), ("pairs", True)):
        constants = {**heads, "INTERLEAVED": interleaved}
        kernel = "_rotary.rotary_kernel"
        found.append(Variant(f"apply_rotary {name}", kernel, _typed("bf16"), constants))
    found += _sampling()
    found.append(Variant("silu_mul", "_silu_mul.silu_mul_kernel", _typed("bf16"), tile))
    return found


def _sampling() -> list[Variant]:
    tile = tile_of_scan(150_000)
    scan = {"TILE": tile, "num_warps": warps_of_row(4 * tile)}
    drawn = {"ALL_GREEDY": False, "FILTERED": True, **scan}
    greedy = {"ALL_GREEDY": True, "FILTERED": False, **scan}
    types = {"logits": "*bf16"}
    return [
        Variant("sample", "_sample.sample_kernel", {}, drawn),
        Variant("sample greedy", "_sample.sample_kernel", {"values": "*bf16"}, greedy),
        Variant("sample mask", "_sample.mask_kernel", {}, {"TILE": tile_of_row(150_000)}),
        Variant("sample edits", "_sample.edit_kernel", {}, {"TILE": 256}),
        Variant(
            "sample logprobs", "_sample_logprobs.logprobs_kernel", types, {"TILE_R": 32, **scan}
        ),
    ]


def compile_variant(variant: Variant, target: str) -> Usage:
    """Compile for a GPU and look at the result; raises what Triton raises."""
    gpu, _ = TARGETS[target]
    module, _, function = variant.kernel.partition(".")
    kernel = getattr(_MODULES[module], function)
    options = {name: value for name, value in variant.constants.items() if name.startswith("num_")}
    constants = {name: value for name, value in variant.constants.items() if name not in options}
    types = _TYPES | variant.types
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # As in a launch: allocations are aligned, and so are the strides of real models.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name.endswith("stride") and "scale" not in name)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=gpu, options=options)
    registers, spills = (_hip_usage if gpu.backend == "hip" else _cuda_usage)(compiled.asm)
    return Usage(variant.name, target, registers, spills, compiled.metadata.shared)


_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        _kv_write,
        _paged_attention,
        _rms_norm,
        _rotary,
        _sample,
        _sample_logprobs,
        _silu_mul,
    )
}


def _cuda_usage(asm: Any) -> tuple[int, int]:
    """Registers and spilled bytes, as the tools that come with Triton read them from the binary."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(asm["cubin"])
        binary.flush()
        command = [str(tool), "--dump-resource-usage", binary.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [registers] = re.findall(r"REG:(\d+)", report)
    # These kernels have no arrays of their own, so that a stack holds spilled registers only.
    stack = re.findall(r"(?:STACK|LOCAL):(\d+)", report)
    return int(registers), sum(int(number) for number in stack)


def _hip_usage(asm: Any) -> tuple[int, int]:
    """Vector registers and spilled bytes, from the notes in the assembler text."""
    notes = asm["amdgcn"]
    [registers] = re.findall(r"\.vgpr_count:\s+(\d+)", notes)
    [spills] = re.findall(r"\.vgpr_spill_count:\s+(\d+)", notes)
    return int(registers), 4 * int(spills)


def _compile_one(job: tuple[Variant, str]) -> Usage:
    return compile_variant(*job)


def compile_all(targets: Iterable[str] = TARGETS, workers: int = 2) -> list[Usage]:
    """The usage of every variant for each of these GPUs."""
    jobs = [(variant, name) for name in targets for variant in variants(TARGETS[name][1])]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(_compile_one, jobs))


def table(usages: Iterable[Usage]) -> Iterator[str]:
    """A Markdown table: a line for each variant, a column for each GPU."""
    cells: dict[str, dict[str, Usage]] = {}
    for usage in usages:
        cells.setdefault(usage.variant, {})[usage.target] = usage
    targets = list(next(iter(cells.values())))
    yield f"| Kernel | {' | '.join(targets)} |"
    yield f"|---|{'---|' * len(targets)}"
    for variant, row in cells.items():
        texts = [f"{u.registers} / {u.spills} / {u.shared / KIB:.0f}" for u in row.values()]
        yield f"| {variant} | {' | '.join(texts)} |"


def write_table(document: Path, usages: Iterable[Usage]) -> None:
    """Put the table into a document in place of the one between `MARKS`.

    ValueError naming the document if it has no such marks.
    """
    text = document.read_text()
    head, begin, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{document} has no place for the table: {' '.join(MARKS)}")
    rows = "\n".join(table(usages))
    document.write_text(f"{head}{begin}\n{rows}\n{end}{tail}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miniinfer.kernels.compile_check",
        description="Compile every kernel for GPUs that need not be there, and print a table of "
        "the registers / spilled bytes / KiB of shared memory that each takes.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one object for each kernel and GPU"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DOCUMENT",
        help="put the table between its marks in a document instead, as kernels/README.md",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        metavar="GPU",
        help=f"{', '.join(TARGETS)} (default: all)",
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="processes (default: %(default)s)"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Compile, and print or write the table."""
    options = _parser().parse_args(arguments)
    usages = compile_all(options.targets, options.workers)
    if options.write:
        write_table(options.write, usages)
    elif options.json:
        print(json.dumps([dataclasses.asdict(usage) for usage in usages]))
    else:
        print("\n".join(table(usages)))


if __name__ == "__main__":
    main()
