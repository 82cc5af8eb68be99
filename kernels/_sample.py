"""The Triton kernels of `sample`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miniinfer.sampling import SampleOutput, SamplingBatch
from miniinfer.sampling_params import GREEDY_TEMPERATURE

from ._launch import power_of_2, tile_of_row, tile_of_scan, warps_of_row
from ._sample_logprobs import launch_logprobs
from ._select import find_peak, load_values, pack, select, sum_closely, sum_weights, weights_of

_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_EDITS = 256


def launch(logits: Tensor, batch: SamplingBatch, vocab_size: int) -> SampleOutput:
    """Run the kernels: a copy of the logits with edits and masks, then a program for each row."""
    count = logits.shape[0]
    sampled = torch.empty(count, dtype=torch.int32, device=logits.device)
    bad = torch.empty(count, dtype=torch.bool, device=logits.device)
    output = SampleOutput(sampled, bad)
    is_filtered = batch.any_top_k or batch.any_top_p or batch.any_min_p
    is_filtered = is_filtered and not batch.all_greedy
    is_edited = batch.masks is not None or batch.edit_token.numel() > 0
    logprobs = batch.num_logprobs >= 0
    # Packing writes over a row, and the ids of what is packed.
    packs = is_filtered or logprobs
    shape = (count, vocab_size)
    packed_ids = torch.empty(shape if packs else (0,), dtype=torch.int32, device=logits.device)
    values = logits
    if is_edited or packs:
        values = torch.empty(shape, dtype=torch.float32, device=logits.device)
        _edit(logits, values, batch)
    tile = tile_of_scan(vocab_size)
    sample_kernel[(count,)](
        values,
        packed_ids,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.uniform,
        sampled,
        bad,
        values.stride(0),
        vocab_size,
        ALL_GREEDY=batch.all_greedy,
        FILTERED=is_filtered,
        TILE=tile,
        num_warps=warps_of_row(4 * tile),
    )
    if logprobs:
        launch_logprobs(output, logits, values, packed_ids, batch.num_logprobs)
    return output


def _edit(logits: Tensor, values: Tensor, batch: SamplingBatch) -> None:
    vocab_size = values.shape[1]
    values.copy_(logits[:, :vocab_size])
    edits = batch.edit_token.numel()
    if edits:
        edit_kernel[(triton.cdiv(edits, _EDITS),)](
            values,
            batch.edit_sample,
            batch.edit_token,
            batch.edit_repetition,
            batch.edit_bias,
            edits,
            vocab_size,
            TILE=min(_EDITS, power_of_2(edits)),
        )
    if batch.masks is not None and batch.masks.rows.numel():
        tile = tile_of_row(vocab_size)
        mask_kernel[(batch.masks.rows.numel(), triton.cdiv(vocab_size, tile))](
            values,
            batch.masks.rows,
            batch.masks.bits,
            batch.masks.bits.stride(0),
            vocab_size,
            TILE=tile,
        )


@triton.jit
def mask_kernel(
    values,  # float32 [N, vocab_size]
    rows,  # int32 [R]
    bits,  # int32 [R, ceil(vocab_size / 32)]
    bits_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """`TILE` logits of one masked row become -inf where their bit is 0."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = column < vocab_size
    word = tl.load(bits + mask * bits_stride + column // 32, mask=inside, other=0)
    refused = ((word >> (column % 32)) & 1) == 0
    tl.store(values + row * vocab_size + column, float("-inf"), mask=inside & refused)


@triton.jit
def edit_kernel(
    values,  # float32 [N, vocab_size]
    edit_sample,  # int32 [E]
    edit_token,  # int32 [E]
    edit_repetition,  # float32 [E]
    edit_bias,  # float32 [E]
    edits,
    vocab_size,
    TILE: tl.constexpr,
):
    """`TILE` edits; no two are of one place."""
    edit = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = edit < edits
    row = tl.load(edit_sample + edit, mask=inside, other=0).to(tl.int64)
    token = tl.load(edit_token + edit, mask=inside, other=vocab_size)
    # Columns beyond the vocabulary are not there to be edited.
    inside = inside & (token < vocab_size)
    repetition = tl.load(edit_repetition + edit, mask=inside, other=1.0)
    bias = tl.load(edit_bias + edit, mask=inside, other=0.0)
    at = values + row * vocab_size + token
    number = tl.load(at, mask=inside, other=0.0)
    scaled = tl.where(number > 0, number / repetition, number * repetition)
    tl.store(at, scaled + bias, mask=inside)


@triton.jit
def sample_kernel(
    values,  # [N, vocab_size], float32 and to be written over if FILTERED
    packed_ids,  # int32 [N, vocab_size] if FILTERED
    temperatures,  # float32 [N]
    top_ks,  # int32 [N]
    top_ps,  # float32 [N]
    min_ps,  # float32 [N]
    uniforms,  # float32 [N]
    sampled,  # int32 [N]
    bad,  # bool [N]
    values_stride,
    vocab_size,
    ALL_GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of one row."""
    index = tl.program_id(0)
    row = values + index.to(tl.int64) * values_stride
    peak, best, is_bad = find_peak(row, vocab_size, TILE)
    token = best
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + index)
        # A row without one finite logit has no distribution: it keeps its first token.
        if (temperature > _GREEDY_TEMPERATURE) & (peak > float("-inf")) & ~is_bad:
            top_k = tl.load(top_ks + index)
            top_p = tl.load(top_ps + index)
            min_p = tl.load(min_ps + index)
            top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0)
            # The number stands for an interval of 2^-24, and the share is its middle.
            share = tl.load(uniforms + index).to(tl.float64) + 2.9802322387695312e-08
            if (top_k > 0) | (top_p < 1) | (min_p > 0):
                if FILTERED:
                    ids = packed_ids + index.to(tl.int64) * vocab_size
                    token = draw_by_rank(
                        row, ids, vocab_size, peak, temperature, top_k, top_p, min_p, share, TILE
                    )
            else:
                token = draw_by_id(row, vocab_size, peak, temperature, share, TILE)
    tl.store(sampled + index, tl.where(is_bad, -1, token))
    tl.store(bad + index, is_bad)


@triton.jit
def draw_by_id(row, vocab_size, peak, temperature, share, TILE: tl.constexpr):
    """The token at `share` of the distribution laid out by id."""
    lane = tl.arange(0, TILE)
    target = share * sum_weights(row, vocab_size, peak, temperature, TILE)
    up_to = tl.zeros([], tl.float64)
    # The tile in which the sum passes the target; if rounding keeps it, the last with a weight.
    tile = 0
    before = up_to
    for start in range(0, vocab_size, TILE):
        numbers = load_values(row, start + lane, vocab_size)
        mass = sum_closely(weights_of(numbers, peak, temperature), TILE)
        take = (up_to <= target) & (mass > 0)
        tile = tl.where(take, start, tile)
        before = tl.where(take, up_to, before)
        up_to += mass
    weights = weights_of(load_values(row, tile + lane, vocab_size), peak, temperature)
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    last = tl.max(tl.where(weights > 0, lane, 0), axis=0)
    first = tl.min(tl.where(cumulative > target - before, lane, last), axis=0)
    return tile + first


@triton.jit
def draw_by_rank(
    row, ids, vocab_size, peak, temperature, top_k, top_p, min_p, share, TILE: tl.constexpr
):
    """The token at `share` of what min_p, top_k and top_p keep, laid out by falling probability."""
    length = vocab_size
    packed = False
    low, kept = find_least(row, length, peak, temperature, min_p, TILE)
    if min_p > 0:
        length = pack(row, ids, length, packed, row, ids, low, length, TILE)
        packed = True
    if (top_k > 0) & (top_k < kept):
        low, index, length = select(
            row, ids, length, packed, row, ids, low, peak, kept, peak, temperature,
            top_k, True, False, TILE,
        )  # fmt: skip
        length = pack(row, ids, length, True, row, ids, low, index + 1, TILE)
        kept = length
        packed = True
    mass = sum_weights(row, length, peak, temperature, TILE)
    if top_p < 1:
        low, index, length = select(
            row, ids, length, packed, row, ids, low, peak, kept, peak, temperature,
            top_p.to(tl.float64) * mass, False, False, TILE,
        )  # fmt: skip
        length = pack(row, ids, length, True, row, ids, low, index + 1, TILE)
        kept = length
        packed = True
        mass = sum_weights(row, length, peak, temperature, TILE)
    value, index, length = select(
        row, ids, length, packed, row, ids, low, peak, kept, peak, temperature,
        share * mass, False, True, TILE,
    )  # fmt: skip
    return find_tie(row, ids, length, value, index, TILE)


@triton.jit
def find_least(row, length, peak, temperature, min_p, TILE: tl.constexpr):
    """The least value whose weight is above 0 and not below `min_p`; how many are not less."""
    lane = tl.arange(0, TILE)
    least = tl.full([TILE], float("inf"), tl.float32)
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        numbers = load_values(row, start + lane, length)
        weights = weights_of(numbers, peak, temperature)
        kept = (weights > 0) & (weights >= min_p)
        least = tl.where(kept, tl.minimum(least, numbers), least)
        count += kept.to(tl.int32)
    return tl.min(least, axis=0), tl.sum(count, axis=0)


@triton.jit
def find_tie(row, ids, length, value, index, TILE: tl.constexpr):
    """The id of the element at `index` among those equal to `value`, of a packed row."""
    lane = tl.arange(0, TILE)
    ties = 0
    token = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        at = start + lane
        tie = (load_values(row, at, length) == value) & (at < length)
        place = ties + tl.cumsum(tie.to(tl.int32), axis=0) - 1
        wanted = tie & (place == index)
        token += tl.load(ids + at, mask=wanted, other=0)
        ties += tl.sum(tie.to(tl.int32), axis=0)
    return tl.sum(token, axis=0)
