"""Compiles for an H100 what launches ask for, as they do: `python as_launched.py` without a GPU.

Triton compiles a kernel anew for what it finds in a launch's arguments: pointers and numbers that
16 divides, and a number of 1, which becomes a constant. `compile_check` names such things itself;
here they are those of real calls, which compile and go no further.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from miniinfer import kernels
from miniinfer.kernels import _fp8, _launch, _measure
from miniinfer.kernels._check_accuracy import sampling_batch
from miniinfer.sampling import TokenMasks

CPU = torch.device("cpu")
H100 = _launch.Traits("H100", "cuda", 90, 227 * 1024, 132)
BF16 = torch.bfloat16


class Driver:
    """Stands for the driver of a machine with an H100."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CPU


def pretend() -> dict[str, int]:
    """Have all operations launch for the H100; counts launches by kernel."""
    driver.set_active(Driver())
    launches: dict[str, int] = {}
    compile_only = JITFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if "WIDEN" in constants:
            constants["WIDEN"] = False
        name = kernel.fn.__name__
        launches[name] = launches.get(name, 0) + 1
        compile_only(kernel, *arguments, grid=grid, warmup=True, **constants)

    JITFunction.run = run
    for name in ("kv_write", "paged_attention", "rms_norm", "rotary", "sample", "silu_mul"):
        module = importlib.import_module(f"miniinfer.kernels.{name}")
        module.use_triton = lambda tensor: True
    for name in ("_kv_write", "_paged_attention"):
        module = importlib.import_module(f"miniinfer.kernels.{name}")
        module.traits_of = lambda device: H100
        module.fp8_mode = lambda cache: _fp8.NATIVE if cache.itemsize == 1 else _fp8.OFF
    return launches


def attention() -> None:
    def attend(requests: list[tuple[int, int]], fp8: bool = False, **options: Any) -> None:
        sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": BF16}
        case = _measure.attention_case(CPU, requests=requests, fp8=fp8, **sizes)
        kernels.paged_attention(**case, **options)

    attend([(1, 4096)] * 8, num_decodes=8)
    # One request, one block of it.
    attend([(1, 1)], num_decodes=1)
    attend([(300, 300)])
    attend([(1, 500), (70, 90), (5, 5)], fp8=True, window=1, soft_cap=30.0, num_decodes=1)


def between_the_matrices() -> None:
    for tokens in (1, 5):
        x = torch.zeros(tokens, 64, dtype=BF16)
        kernels.rms_norm(x, x[0], 1e-5)
        kernels.add_rms_norm(x, x.clone(), x[0], 1e-5)
        kernels.silu_mul(x)
        heads = torch.zeros(tokens, 4, 16, dtype=BF16)
        table = torch.zeros(8, 16)
        positions = torch.zeros(tokens, dtype=torch.int32)
        for count in (1, 3):
            kernels.head_norm(heads[:, :count], torch.ones(count, 16, dtype=BF16), 1e-5)
            query = heads[:, :count]
            kernels.apply_rotary(query, None, positions, table[:, :8], table[:, 8:])
        for kind, scale in ((BF16, None), (torch.float8_e4m3fn, torch.ones(1))):
            for block_size in (1, 16):
                caches = torch.zeros(2, 4, block_size, 2, 16).to(kind)
                kernels.write_kv(
                    heads[:, :2],
                    heads[:, 2:],
                    *caches,
                    positions.long(),
                    key_scale=scale,
                    value_scale=scale,
                )


def sampling() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    edits = {"edit_sample": one, "edit_token": one}
    edits |= {"edit_repetition": one + 1.0, "edit_bias": one.float()}
    for rows, vocab in ((1, 1), (2, 4200)):
        masks = TokenMasks(one, torch.zeros(1, -(-vocab // 32), dtype=torch.int32))
        for changes in (
            {"num_logprobs": -1, "all_greedy": True},
            {"num_logprobs": 0},
            {"num_logprobs": 1, "masks": masks, **edits},
            {"num_logprobs": -1, "any_top_k": False, "any_top_p": False, "any_min_p": False},
        ):
            kernels.sample(torch.zeros(rows, vocab), sampling_batch(rows, CPU, **changes))


if __name__ == "__main__":
    launches = pretend()
    attention()
    between_the_matrices()
    sampling()
    json.dump(launches, sys.stdout)
