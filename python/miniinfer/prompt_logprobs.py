"""The log probabilities of a step's prompt tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .sampling import token_logprobs
from .step import StepBuffers, StepHeader

__all__ = ["report_prompts"]

_MOST_LOGITS = 2**24
"""Logits computed at once: those of a whole prompt could take gigabytes."""


def report_prompts(
    buffers: StepBuffers,
    header: StepHeader,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> None:
    """Tell the core the log probabilities that a planned step's prompts asked for, if any did.

    `logits` maps indices of the step's tokens, int32 [R], to float32 [R, at least `vocab_size`].
    """
    if header.num_prompt_rows == 0:
        return
    index, target = buffers.prompt_rows(header)
    rows = max(1, _MOST_LOGITS // vocab_size)
    parts = [slice(first, first + rows) for first in range(0, len(index), rows)]
    found = [
        token_logprobs(
            logits(index[part])[:, :vocab_size], target[part].long(), header.num_prompt_logprobs
        )
        for part in parts
    ]
    buffers.take_prompt_logprobs(
        torch.cat([part.logprob for part in found]),
        torch.cat([part.rank for part in found]),
        torch.cat([part.top_ids for part in found]),
        torch.cat([part.top_logprobs for part in found]),
    )
