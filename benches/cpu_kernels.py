"""The kernels for CPUs alone, and what the machine could do at most."""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from miniinfer.cpu.linear import QuantLinear
from miniinfer.gguf_file import GGMLType

ROWS = (1, 8, 32, 128, 512)


def best(run: Callable[[], object], seconds: float = 1.0) -> float:
    """The shortest of repeated runs, in seconds: what other processes do to it only adds."""
    shortest, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or shortest == math.inf:
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes together."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source))


class Peaks(NamedTuple):
    """Operations a second, a multiplication and an addition counted as two."""

    float32: float
    int8: float
    """0 without VNNI."""
    bfloat16: float
    """0 without AVX512_BF16."""

    def of(self, kind: str) -> float:
        """What weights of a type are multiplied with at most."""
        if kind.startswith("Q"):
            return self.int8 or self.float32
        return self.bfloat16 or self.float32 if kind == "BF16" else self.float32


def arithmetic_peaks(threads: int) -> Peaks | None:
    """What the machine's cores reach together; None without a compiler."""
    source = Path(__file__).with_name("peaks.rs")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        options = ("--edition", "2021", "-C", "opt-level=3", "-C", "target-cpu=native")
        try:
            subprocess.run(["rustc", *options, "-o", program, source], check=True)
        except FileNotFoundError:
            return None
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    return Peaks(*map(float, done.stdout.split()))


def layer_shapes() -> list[tuple[int, int]]:
    """Rows and columns of the built-in model's matrices, its head aside."""
    return [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30


def as_blocks(kind: GGMLType, values: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Type, bits and bytes for `QuantLinear`; Q4_1 and Q8_0 by the quantiser of the kernels."""
    if kind is GGMLType.BF16:
        return kind, 0, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    bits = {GGMLType.Q4_1: 4, GGMLType.Q8_0: 8, GGMLType.F32: 0}[kind]
    return GGMLType.F32, bits, values.view(np.uint8)


def measure_kernels(bandwidth: float) -> dict[str, Any]:
    """Milliseconds for all matrices of the layers, by type and rows, beside torch's float32."""
    generator = np.random.default_rng(0)
    table: dict[str, Any] = {}
    for kind in (GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.BF16, GGMLType.F32):
        layers = []
        for rows, columns in layer_shapes():
            values = generator.standard_normal((rows, columns), np.float32)
            layers.append(QuantLinear([(*as_blocks(kind, values), rows, columns)]))
        floor = sum(layer.num_bytes for layer in layers) / bandwidth
        table[kind.name] = {"roofline_ms": 1000 * floor} | _by_rows(_forward(layers))
    weights = [torch.randn(shape) for shape in layer_shapes()]
    table["torch float32"] = _by_rows(
        lambda count: [
            torch.nn.functional.linear(torch.ones(count, weight.shape[1]), weight)
            for weight in weights
        ]
    )
    return table


def _forward(layers: list[QuantLinear]) -> Callable[[int], object]:
    def run(count: int) -> None:
        for layer in layers:
            layer.forward(torch.ones(count, layer.columns), torch.empty(count, layer.rows))

    return run


def _by_rows(run: Callable[[int], object]) -> dict[str, float]:
    return {str(rows): 1000 * best(lambda rows=rows: run(rows)) for rows in ROWS}
