"""The sampler in Rust, over the memory of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._core import sample_rows
from ..sampling_params import GREEDY_TEMPERATURE

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
        _address("temperature", batch.temperature, torch.float32, (rows,)),
        _address("top_k", batch.top_k, torch.int32, (rows,)),
        _address("top_p", batch.top_p, torch.float32, (rows,)),
        _address("min_p", batch.min_p, torch.float32, (rows,)),
        _address("uniform", batch.uniform, torch.float32, (rows,)),
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
        _address("edit_sample", batch.edit_sample, torch.int32, shape),
        _address("edit_token", batch.edit_token, torch.int32, shape),
        _address("edit_repetition", batch.edit_repetition, torch.float32, shape),
        _address("edit_bias", batch.edit_bias, torch.float32, shape),
        count,
    )


def _masks(batch: SamplingBatch) -> tuple[int, int, int, int]:
    if batch.masks is None:
        return 0, 0, 0, 0
    rows, bits = batch.masks.rows, batch.masks.bits
    count, words = bits.shape
    return (
        _address("the rows of masks", rows, torch.int32, (count,)),
        _address("the bits of masks", bits, torch.int32, (count, words)),
        count,
        words,
    )


def _address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous():
        return tensor.data_ptr()
    raise ValueError(
        f"{name} must be {str(dtype).removeprefix('torch.')} {list(shape)} and contiguous, "
        f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    )
