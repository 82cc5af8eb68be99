"""Choosing the token of every row of logits: edits, masks of grammars, filters and logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from miniinfer.sampling import SampleOutput, SamplingBatch
from miniinfer.sampling import sample as sample_in_torch

from ._dispatch import check_dense, check_shape, use_triton


def sample(logits: Tensor, batch: SamplingBatch, vocab_size: int | None = None) -> SampleOutput:
    """Choose one token per row of `logits`, [N, V] with dense rows, by the parameters in `batch`.

    What is chosen, the order of the filters and the rules for equal logits are those of
    `miniinfer.sampling.sample`: the same token, unless the uniform number lies so close to the
    border of two that rounding decides. `logits` may have any float type and are left as they are.
    A row whose mask allows no token takes the first. The log probabilities of a bad row are not
    defined. Raises ValueError where shapes or types do not fit.
    """
    vocab_size = _check(logits, batch, vocab_size)
    if not use_triton(logits):
        return sample_reference(logits, batch, vocab_size)
    from ._sample import launch

    return launch(logits, batch, vocab_size)


def sample_reference(
    logits: Tensor, batch: SamplingBatch, vocab_size: int | None = None
) -> SampleOutput:
    """`sample` in torch: `miniinfer.sampling` over a copy, as that function edits in place."""
    return sample_in_torch(logits.to(torch.float32, copy=True), batch, vocab_size)


def _check(logits: Tensor, batch: SamplingBatch, vocab_size: int | None) -> int:
    if logits.dim() != 2 or not logits.is_floating_point():
        shape = tuple(logits.shape)
        raise ValueError(f"logits must be floats [N, V]; got {logits.dtype} of shape {shape}")
    rows, columns = logits.shape
    if columns == 0 or (vocab_size is not None and not 0 < vocab_size <= columns):
        raise ValueError(f"vocab_size must be between 1 and {columns} columns; got {vocab_size}")
    vocab_size = columns if vocab_size is None else vocab_size
    check_dense("logits", logits, 1)
    for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
        check_shape(name, getattr(batch, name), (rows,))
    if batch.masks is not None:
        masks = batch.masks
        check_shape("masks.bits", masks.bits, (masks.rows.shape[0], -(-vocab_size // 32)))
        check_dense("masks.bits", masks.bits, 1)
        if masks.bits.dtype != torch.int32:
            raise ValueError(f"masks.bits must be int32; got {masks.bits.dtype}")
    return vocab_size
