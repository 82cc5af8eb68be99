"""The Triton kernel of the log probabilities of `sample`."""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miniinfer.sampling import SampleOutput

from ._launch import power_of_2, tile_of_scan, warps_of_row
from ._select import count_above, find_peak, pack, select, sum_weights

_LOWEST = tl.constexpr(-3.4028234663852886e38)
# Tokens whose ranks are found at a time.
_MOST_RANKS = 64


def launch_logprobs(
    output: SampleOutput, logits: Tensor, values: Tensor, ids: Tensor, num_logprobs: int
) -> None:
    """Fill in the log probabilities of `output`, of `logits` as the model gave them.

    `values`, float32, and `ids`, int32, [N, vocab_size] each, are written over.
    """
    count, vocab_size = values.shape
    top = min(num_logprobs, vocab_size)
    device = logits.device
    output.logprob = torch.empty(count, dtype=torch.float32, device=device)
    output.rank = torch.empty(count, dtype=torch.int32, device=device)
    output.top_ids = torch.empty(count, top, dtype=torch.int32, device=device)
    output.top_logprobs = torch.empty(count, top, dtype=torch.float32, device=device)
    tile = tile_of_scan(vocab_size)
    logprobs_kernel[(count,)](
        logits,
        values,
        ids,
        output.sampled,
        output.logprob,
        output.rank,
        output.top_ids,
        output.top_logprobs,
        logits.stride(0),
        vocab_size,
        top,
        TILE=tile,
        TILE_R=min(_MOST_RANKS, power_of_2(top)),
        num_warps=warps_of_row(4 * tile),
    )


@triton.jit
def logprobs_kernel(
    logits,  # [N, >= vocab_size]
    values,  # float32 [N, vocab_size], written over
    packed_ids,  # int32 [N, vocab_size], written over
    sampled,  # int32 [N]
    logprobs,  # float32 [N]
    ranks,  # int32 [N]
    top_ids,  # int32 [N, top]
    top_logprobs,  # float32 [N, top]
    logits_stride,
    vocab_size,
    top,
    TILE: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """The log probabilities of one row: its token's and the `top` greatest."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    peak, _, is_bad = find_peak(row, vocab_size, TILE)
    # A bad row has no probabilities, and none without a finite logit: -inf stands for all of them.
    has_none = is_bad | (peak == float("-inf"))
    base = tl.where(has_none, 0.0, peak)
    total = sum_weights(row, vocab_size, base, 1.0, TILE)
    log_total = base + tl.log(tl.where(has_none, 1.0, total)).to(tl.float32)
    chosen = tl.load(row + tl.maximum(tl.load(sampled + index), 0)).to(tl.float32)
    tl.store(logprobs + index, chosen - log_total)
    tl.store(ranks + index, count_above(row, vocab_size, chosen, TILE) + 1)
    if top > 0:
        to_values = values + index * vocab_size
        to_ids = packed_ids + index * vocab_size
        if has_none:
            # Their order is that of the ids.
            _store_first(to_ids, top, TILE)
        else:
            lowest = tl.full([], _LOWEST, tl.float32)
            least, tie, length = select(
                row, to_ids, vocab_size, False, to_values, to_ids, lowest, peak, vocab_size,
                peak, 1.0, top, True, False, TILE,
            )  # fmt: skip
            pack(to_values, to_ids, length, True, to_values, to_ids, least, tie + 1, TILE)
        _store_ranked(
            row, to_values, to_ids, top_ids + index * top, top_logprobs + index * top, log_total,
            top, has_none, TILE_R,
        )  # fmt: skip


@triton.jit
def _store_first(ids, top, TILE: tl.constexpr):
    """The first ids."""
    for start in range(0, top, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(ids + at, at, mask=at < top)
    tl.debug_barrier()


@triton.jit
def _store_ranked(
    row, values, ids, top_ids, top_logprobs, log_total, top, by_id, TILE_R: tl.constexpr
):
    """Store `top` packed elements in the order of their values, equal ones by place."""
    lane = tl.arange(0, TILE_R)
    for start in range(0, top, TILE_R):
        at = start + lane  # [TILE_R]
        inside = at < top
        mine = tl.load(values + at, mask=inside, other=0.0)
        rank = tl.zeros([TILE_R], tl.int32)
        for other_start in range(0, top, TILE_R):
            other = other_start + lane  # [TILE_R]
            theirs = tl.load(values + other, mask=other < top, other=float("-inf"))
            before = theirs[None, :] > mine[:, None]  # [TILE_R, TILE_R]
            before = before | ((theirs[None, :] == mine[:, None]) & (other[None, :] < at[:, None]))
            before = before & (other < top)[None, :]
            rank += tl.sum(before.to(tl.int32), axis=1)
        rank = tl.where(by_id, at, rank)
        token = tl.load(ids + at, mask=inside, other=0)
        # The packed value of -inf is another.
        logit = tl.load(row + token, mask=inside, other=0.0).to(tl.float32)
        tl.store(top_ids + rank, token, mask=inside)
        tl.store(top_logprobs + rank, logit - log_total, mask=inside)
