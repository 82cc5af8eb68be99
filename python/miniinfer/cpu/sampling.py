"""The sampler in Rust, over the memory of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._core import sample_rows
from ..sampling_params import GREEDY_TEMPERATURE
from .tensors import address

if TYPE_CHECKING:
    from ..sampling import SamplingBatch

__all__ = ["can_sample", "sample_on_cpu"]


def can_sample(logits: Tensor) -> bool:
    """Whether the sampler in Rust can read `logits`: on the CPU, each row in one piece."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32:
        return False
    row, column = logits.stride()
    return column == 1 and (row >= logits.shape[1] or logits.shape[0] == 1)


def sample_on_cpu(
    logits: Tensor, batch: SamplingBatch, vocab_size: int | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    """`miniinfer.sampling.sample` for `logits` that `can_sample` takes.

    The tokens, int32 [N], -1 in bad rows; and, if the batch asks for them, `logprob`, `rank`,
    `top_ids` and `top_logprobs`. Raises `ValueError` where shapes or types do not fit.
    """
    rows, columns = logits.shape
    vocab_size = columns if vocab_size is None else vocab_size
    parameters = (
        address("temperature", batch.temperature, (rows,)),
        address("top_k", batch.top_k, (rows,), torch.int32),
        address("top_p", batch.top_p, (rows,)),
        address("min_p", batch.min_p, (rows,)),
        address("uniform", batch.uniform, (rows,)),
        GREEDY_TEMPERATURE,
    )
    sampled = torch.empty(rows, dtype=torch.int32)
    logprobs = None
    addresses = None
    if batch.num_logprobs >= 0:
        count = min(batch.num_logprobs, vocab_size)
        logprobs = (
            torch.empty(rows),
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows, count, dtype=torch.int32),
            torch.empty(rows, count),
        )
        logprob, rank, top_ids, top_logprobs = (tensor.data_ptr() for tensor in logprobs)
        addresses = (logprob, rank, top_ids, top_logprobs, count)
    stride = columns if rows == 1 else logits.stride(0)
    sample_rows(
        (logits.data_ptr(), rows, columns, stride, vocab_size),
        parameters,
        _edits(batch),
        _masks(batch),
        sampled.data_ptr(),
        addresses,
    )
    return sampled, logprobs


def _edits(batch: SamplingBatch) -> tuple[int, int, int, int, int]:
    count = len(batch.edit_token)
    if count == 0:
        return 0, 0, 0, 0, 0
    shape = (count,)
    return (
        address("edit_sample", batch.edit_sample, shape, torch.int32),
        address("edit_token", batch.edit_token, shape, torch.int32),
        address("edit_repetition", batch.edit_repetition, shape),
        address("edit_bias", batch.edit_bias, shape),
        count,
    )


def _masks(batch: SamplingBatch) -> tuple[int, int, int, int]:
    if batch.masks is None:
        return 0, 0, 0, 0
    rows, bits = batch.masks.rows, batch.masks.bits
    count, words = bits.shape
    return (
        address("the rows of masks", rows, (count,), torch.int32),
        address("the bits of masks", bits, (count, words), torch.int32),
        count,
        words,
    )
