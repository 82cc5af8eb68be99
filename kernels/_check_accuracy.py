"""The kernels' results against references computed in higher precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from miniinfer.sampling import SamplingBatch, TokenMasks

from ._check_result import Result, Sizes
from ._measure import attention_case
from .kv_write import write_kv, write_kv_reference
from .paged_attention import paged_attention, paged_attention_reference
from .rms_norm import add_rms_norm, head_norm, rms_norm_reference
from .rotary import apply_rotary, apply_rotary_reference
from .sample import sample, sample_reference
from .silu_mul import silu_mul

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# The rows whose token may be another: the uniform number lay where rounding decides.
_BORDERLINE = 0.02


def _compare(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Result:
    """The greatest error, over the tolerance's absolute and relative part."""
    wide = actual.double()
    error = ((wide - expected.double()).abs() / (1 + expected.double().abs())).max().item()
    ok = bool(wide.isfinite().all()) and error <= _TOLERANCE[dtype]
    return Result(name, f"error {error:.1e} (at most {_TOLERANCE[dtype]:.0e})", ok, error)


def check_attention(
    sizes: Sizes, device: torch.device, head_dims: Sequence[int] | None = None
) -> Iterator[Result]:
    """Decodes beside chunks: the first head size in every type and cache, others in bfloat16.

    `head_dims`: those to check; None for all.
    """
    length = sizes.context
    requests = [(1, length), (1, 1), (1, 17), (0, 8), (length // 3, length), (5, 33)]
    kinds = [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
    kinds.append((torch.float32, False))
    plain = itertools.product(sizes.head_dims[1:], kinds[:1])
    for head_dim, (dtype, fp8) in (*itertools.product(sizes.head_dims[:1], kinds), *plain):
        if head_dims is not None and head_dim not in head_dims:
            continue
        case = attention_case(
            device,
            requests=requests,
            heads=8,
            kv_heads=2,
            head_dim=head_dim,
            dtype=dtype,
            fp8=fp8,
        )
        options: tuple[dict[str, Any], ...] = (
            {"num_decodes": 3},
            {"num_splits": 4, "num_decodes": 3, "window": length // 2, "soft_cap": 30.0},
        )
        for option in options:
            words = " ".join(str(word) for word in option)
            name = f"attention d{head_dim} {str(dtype)[6:]}{' fp8' if fp8 else ''} {words}"
            actual = paged_attention(**case, **option)
            yield _compare(name, actual, _attention_reference(case, option), dtype)


def _attention_reference(case: dict[str, Any], option: dict[str, Any]) -> Tensor:
    """The attention of the same numbers in float32, [T, H, D]."""
    taken = {name: case[name] for name in ("query_start", "seq_lens", "rows", "block_table")}
    for name in ("query", "key_cache", "value_cache"):
        taken[name] = case[name].float()
    for name, scale in (("key_cache", "key_scale"), ("value_cache", "value_scale")):
        if case[scale] is not None:
            taken[name] *= case[scale].unsqueeze(1)
    return paged_attention_reference(
        **taken,
        scale=taken["query"].shape[2] ** -0.5,
        window=option.get("window"),
        soft_cap=option.get("soft_cap"),
    )


def check_kv_write(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """What is stored, bit by bit, in the type of the keys and in 8 bits."""
    tokens = sizes.rows
    packed = torch.randn(tokens, 4, 128, device=device).bfloat16() * 50
    key, value = packed.chunk(2, 1)
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    slots[::7] = -1
    scale = torch.tensor([0.5, 3.0], device=device)
    for dtype, scales in ((torch.bfloat16, None), (torch.float8_e4m3fn, scale)):
        results = []
        for write in (write_kv, write_kv_reference):
            shape = (2, -(-2 * tokens // 16), 16, 2, 128)
            caches = torch.zeros(shape, device=device).to(dtype)
            write(key, value, caches[0], caches[1], slots, key_scale=scales, value_scale=scales)
            results.append(caches.view(torch.uint8))
        different = int((results[0] != results[1]).sum())
        yield Result(f"write_kv {str(dtype)[6:]}", f"{different} bytes differ", different == 0)


def check_rows(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """RMSNorm, SiLU and rotary embedding."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = str(dtype)[6:]
        x = torch.randn(sizes.rows, sizes.width, device=device).to(dtype)
        residual, weight = torch.randn_like(x), torch.randn_like(x[0])
        normed, total = add_rms_norm(x, residual, weight, 1e-5)
        expected = rms_norm_reference(total.double(), weight.double(), 1e-5)
        yield _compare(f"add_rms_norm {kind}", normed, expected, dtype)
        gate, up = x.double().chunk(2, 1)
        activated = silu_mul(x)
        yield _compare(f"silu_mul {kind}", activated, gate * gate.sigmoid() * up, dtype)
        heads = torch.randn(sizes.rows, 10, 64, device=device).to(dtype)
        weights = torch.randn_like(heads[0])
        normed = head_norm(heads[:, :8], weights[:8], 1e-5)
        expected = rms_norm_reference(heads[:, :8].double(), weights[:8].double(), 1e-5)
        yield _compare(f"head_norm {kind}", normed, expected, dtype)
        angles = torch.rand(sizes.rows, 24, device=device) * 100
        positions = torch.randperm(sizes.rows, device=device).int()
        for interleaved in (False, True):
            turned, wide = heads.clone(), heads.float()
            for apply, tensor in (
                (apply_rotary, turned),
                (apply_rotary_reference, wide),
            ):
                query, key = tensor[:, :8], tensor[:, 8:]
                apply(query, key, positions, angles.cos(), angles.sin(), interleaved=interleaved)
            name = f"apply_rotary {kind}{' interleaved' if interleaved else ''}"
            yield _compare(name, turned, wide, dtype)


def sampling_batch(rows: int, device: torch.device, **changes: Any) -> SamplingBatch:
    """Parameters with every filter on in some rows, and none edited."""
    index = torch.arange(rows, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    fields: dict[str, Any] = {
        "temperature": torch.where(index % 8 == 0, 0.0, 0.5 + 0.1 * (index % 7)),
        "top_k": torch.where(index % 2 == 0, 20, 0).int(),
        "top_p": torch.where(index % 3 == 0, 0.95, 1.0),
        "min_p": torch.where(index % 5 == 0, 0.02, 0.0),
        "uniform": ((index + 0.5) * 0.618034 % 1).float(),
        "all_greedy": False,
        "any_top_k": True,
        "any_top_p": True,
        "any_min_p": True,
        "edit_sample": none,
        "edit_token": none,
        "edit_repetition": none.float(),
        "edit_bias": none.float(),
        "num_logprobs": 5,
    }
    return SamplingBatch(**fields | changes)


def check_sample(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Tokens, ranks and log probabilities against the torch sampler on the CPU."""
    rows, vocab = sizes.samples, sizes.vocab
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    chosen = torch.arange(0, rows, 2, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31 - 1, (len(chosen), -(-vocab // 32)), dtype=torch.int32)
    # Each row's likeliest token is made less likely.
    every = torch.arange(rows, dtype=torch.int32)
    likeliest = logits.argmax(1).int()
    edits = {"edit_sample": every, "edit_token": likeliest}
    edits |= {"edit_repetition": 1 + every / rows, "edit_bias": every / rows - 1}
    host = torch.device("cpu")
    for name in ("sample", "sample masked", "sample edited"):
        ours, theirs = (
            sampling_batch(
                rows,
                place,
                masks=TokenMasks(chosen.to(place), words.to(place)) if "mask" in name else None,
                **{key: of.to(place) for key, of in edits.items() if "edit" in name},
            )
            for place in (device, host)
        )
        expected = sample_reference(logits, theirs)
        actual = sample(logits.to(device), ours)
        same = actual.sampled.cpu() == expected.sampled
        different = int((~same).sum())
        found = f"{different} of {rows} tokens differ"
        yield Result(f"{name} tokens", found, different <= _BORDERLINE * rows, different)
        assert actual.top_ids is not None
        assert expected.top_ids is not None
        ids = bool((actual.top_ids.cpu() == expected.top_ids).all())
        yield Result(f"{name} top ids", "equal" if ids else "different", ids)
        for field in ("logprob", "top_logprobs"):
            numbers = (getattr(actual, field).cpu()[same], getattr(expected, field)[same])
            yield _compare(f"{name} {field}", *numbers, torch.float32)


CHECKS = (check_attention, check_kv_write, check_rows, check_sample)
