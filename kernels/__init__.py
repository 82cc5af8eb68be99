"""The operations of the forward pass that are worth a kernel of their own.

Each has a Triton kernel, used for tensors on a GPU and, under `TRITON_INTERPRET=1`, for all
tensors, and beside it a plain torch function with the same arguments and results, used otherwise.
Triton is not imported before its first use.
"""

from .kv_write import write_kv, write_kv_reference
from .paged_attention import paged_attention, paged_attention_reference
from .rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    head_norm,
    rms_norm,
    rms_norm_reference,
)
from .rotary import apply_rotary, apply_rotary_reference
from .sample import sample, sample_reference
from .silu_mul import silu_mul, silu_mul_reference

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "apply_rotary",
    "apply_rotary_reference",
    "head_norm",
    "paged_attention",
    "paged_attention_reference",
    "rms_norm",
    "rms_norm_reference",
    "sample",
    "sample_reference",
    "silu_mul",
    "silu_mul_reference",
    "write_kv",
    "write_kv_reference",
]
