"""Compiles every kernel for three GPUs, which needs none; prints one line for each."""

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from miniinfer.kernels._kv_write import _write_kv_kernel
from miniinfer.kernels._paged_attention import paged_attention_kernel, tile_sizes
from miniinfer.kernels._rms_norm import _rms_norm_kernel
from miniinfer.kernels._rotary import _rotary_kernel
from miniinfer.kernels._silu_mul import _silu_mul_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = dict.fromkeys(("query_start", "seq_lens", "rows", "block_table", "positions"), "*i32")
TYPES |= dict.fromkeys(("scale", "soft_cap", "eps"), "fp32")
TYPES |= {"slot_mapping": "*i64", "cos": "*fp32", "sin": "*fp32"}
HALVES = "query key value heads key_cache value_cache output x residual weight normed total gate_up"
TYPES |= dict.fromkeys(HALVES.split(), "*bf16")


def attention(head_dim: int, max_query_len: int, options: bool) -> dict[str, int | bool]:
    return {
        "HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": options,
        "HAS_SOFT_CAP": options,
        "WIDEN": False,
        **tile_sizes(head_dim, 4, max_query_len),
    }


KERNELS = [
    (paged_attention_kernel, attention(64, 1, False)),
    (paged_attention_kernel, attention(128, 512, True)),
    (paged_attention_kernel, attention(256, 512, False)),
    (_write_kv_kernel, {"TILE": 1024}),
    (_rms_norm_kernel, {"HAS_RESIDUAL": True, "WIDTH": 4096}),
    (_rotary_kernel, {"HEADS": 32, "HALF": 64}),
    (_silu_mul_kernel, {"TILE": 1024}),
]


def main() -> None:
    for (kernel, constants), (name, target) in itertools.product(KERNELS, TARGETS.items()):
        signature = {
            argument: "constexpr" if argument in constants else TYPES.get(argument, "i32")
            for argument in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=target)
        binary = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
        print(kernel.__name__, name, compiled.metadata.shared, len(binary))


if __name__ == "__main__":
    main()
