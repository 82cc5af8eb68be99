"""The log probabilities of a step's prompt tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .sampling import token_logprobs
from .step import StepBuffers, StepHeader

__all__ = ["PromptScores"]

_MOST_LOGITS = 2**24
"""Logits computed at once: those of a whole prompt could take gigabytes."""


class PromptScores:
    """The log probabilities that a planned step's prompts asked for, on their way to the core."""

    def __init__(self, buffers: StepBuffers, header: StepHeader) -> None:
        self._buffers = buffers
        self._width = header.num_prompt_logprobs
        self._index, self._target = buffers.prompt_rows(header)
        self._found: list[Tensor] = []
        self._on_host: list[Tensor] = []

    def compute(self, logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """Find them on the device.

        `logits` maps indices of the step's tokens, int32 [R], to float32 [R, at least
        `vocab_size`].
        """
        rows = max(1, _MOST_LOGITS // vocab_size)
        parts = [slice(first, first + rows) for first in range(0, len(self._index), rows)]
        found = [
            token_logprobs(
                logits(self._index[part])[:, :vocab_size], self._target[part].long(), self._width
            )
            for part in parts
        ]
        self._found = [
            torch.cat([part.logprob for part in found]),
            torch.cat([part.rank for part in found]),
            torch.cat([part.top_ids for part in found]),
            torch.cat([part.top_logprobs for part in found]),
        ]

    def fetch(self) -> None:
        """Begin to copy them to the host."""
        self._on_host = [tensor.to("cpu", non_blocking=True) for tensor in self._found]

    def report(self) -> None:
        """Tell the core, once they are there."""
        logprob, rank, top_ids, top_logprobs = self._on_host
        self._buffers.take_prompt_logprobs(logprob, rank, top_ids, top_logprobs)
