"""Choosing the token of every row of logits, with edits, filters, a grammar's mask and logprobs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from miniinfer.sampling import SampleOutput, SamplingBatch
from miniinfer.sampling import sample as sample_in_torch

from ._dispatch import check_dense, check_shape, use_triton


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    vocab_size: int | None = None,
    *,
    mask: Tensor | None = None,
) -> SampleOutput:
    """Choose one token per row of `logits`, [N, V] with dense rows, by the parameters in `batch`.

    What is chosen, the order of the filters and the rules for equal logits are those of
    `miniinfer.sampling.sample`: the same token, unless the uniform number lies so close to the
    border of two that rounding decides. `logits` may have any float type and are left as they are.
    mask: int32 or uint32 [N, ceil(vocab_size / 32)], dense rows; the token of id t may be chosen
        if bit t % 32 of word t // 32 of its row is 1. None allows all. A row without an allowed
        token takes the first. Log probabilities do not know of the mask.
    Raises ValueError where shapes or types do not fit.
    """
    vocab_size = _check(logits, batch, vocab_size)
    if mask is not None:
        mask = _check_mask(mask, logits.shape[0], vocab_size)
    if not use_triton(logits):
        return sample_reference(logits, batch, vocab_size, mask=mask)
    from ._sample import launch

    return launch(logits, batch, vocab_size, mask)


def sample_reference(
    logits: Tensor,
    batch: SamplingBatch,
    vocab_size: int | None = None,
    *,
    mask: Tensor | None = None,
) -> SampleOutput:
    """`sample` in torch: a copy with the mask in it, sampled by `miniinfer.sampling`."""
    columns = logits.shape[1] if vocab_size is None else vocab_size
    wide = logits[:, :columns].float()
    # That function edits in place.
    allowed = (
        wide.clone() if mask is None else wide.masked_fill(~_unpack(mask, columns), -torch.inf)
    )
    output = sample_in_torch(allowed, replace(batch, num_logprobs=-1), columns)
    if batch.num_logprobs >= 0:
        everything = replace(batch, num_logprobs=columns, all_greedy=True)
        no_edits = {
            name: getattr(batch, name)[:0]
            for name in ("edit_sample", "edit_token", "edit_repetition", "edit_bias")
        }
        ranked = sample_in_torch(wide.clone(), replace(everything, **no_edits), columns)
        assert ranked.top_ids is not None
        assert ranked.top_logprobs is not None
        top = min(batch.num_logprobs, columns)
        output.top_ids, output.top_logprobs = ranked.top_ids[:, :top], ranked.top_logprobs[:, :top]
        token = output.sampled.clamp(min=0).long().unsqueeze(1)
        place = (ranked.top_ids == token).int().argmax(-1, keepdim=True)
        output.logprob = ranked.top_logprobs.gather(1, place).squeeze(1)
        output.rank = (wide > wide.gather(1, token)).sum(-1, dtype=torch.int32) + 1
    return output


def _unpack(mask: Tensor, columns: int) -> Tensor:
    """Which tokens a mask allows, bool [N, columns]."""
    ids = torch.arange(columns, device=mask.device)
    words = mask.view(torch.int32)[:, ids // 32]
    return (words >> (ids % 32).int()) & 1 == 1


def _check(logits: Tensor, batch: SamplingBatch, vocab_size: int | None) -> int:
    if logits.dim() != 2 or not logits.is_floating_point():
        shape = tuple(logits.shape)
        raise ValueError(f"logits must be floats [N, V]; got {logits.dtype} of shape {shape}")
    rows, columns = logits.shape
    if columns == 0 or (vocab_size is not None and not 0 < vocab_size <= columns):
        raise ValueError(f"vocab_size must be between 1 and {columns} columns; got {vocab_size}")
    check_dense("logits", logits, 1)
    for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
        check_shape(name, getattr(batch, name), (rows,))
    return columns if vocab_size is None else vocab_size


def _check_mask(mask: Tensor, rows: int, vocab_size: int) -> Tensor:
    check_shape("mask", mask, (rows, -(-vocab_size // 32)))
    check_dense("mask", mask, 1)
    if mask.dtype not in (torch.int32, torch.uint32):
        raise ValueError(f"mask must be int32 or uint32; got {mask.dtype}")
    return mask.view(torch.int32)
