"""The arrays of a step: allocated once, registered with the core, seen as tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ._core import Driver
from .model.batch import ForwardBatch
from .sampling import SampleOutput, SamplingBatch, TokenMasks

__all__ = ["StepBuffers", "StepHeader", "StepInputs"]

# Bits of the header's flags, as the core sets them.
_RANDOM, _TOP_K, _TOP_P, _MIN_P = 1, 2, 4, 8


@dataclass(slots=True, frozen=True)
class StepHeader:
    """The scalars of a planned step, in the order of the core's `header` array."""

    num_tokens: int
    num_seqs: int
    num_decodes: int
    num_samples: int
    max_query_len: int
    max_seq_len: int
    flags: int
    num_logprobs: int
    num_edits: int
    num_prompt_rows: int
    num_prompt_logprobs: int
    num_masks: int
    num_pending: int


_HEADER_FIELDS = len(fields(StepHeader))


@dataclass(slots=True, frozen=True)
class StepInputs:
    """What the forward pass of a step reads, in host memory; the arrays of `ForwardBatch`."""

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    logits_index: npt.NDArray[np.int32]


class StepBuffers:
    """One slot's arrays. Their addresses never change; each step uses the first part of each.

    The core writes the inputs in `plan`, `write_samples` writes what was sampled, and the core
    reads it in `commit`. Shapes and dtypes are those of `ForwardBatch` and `SamplingBatch`.
    """

    def __init__(self, core: Driver, slot: int, device: torch.device) -> None:
        self.slot = slot
        self._core = core
        self._device = device
        self._host: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, Tensor] = {}
        pinned = device.type == "cuda"
        for name, dtype, length in core.array_specs():
            tensor = torch.zeros(length, dtype=getattr(torch, dtype), pin_memory=pinned)
            self._tensors[name] = tensor
            self._host[name] = tensor.numpy()
        core.register_slot(slot, self._host)
        self._block_table = self._tensors["block_table"].view(core.block_table_rows(), -1)
        num_samples = len(self._host["sampled"])
        self._top_ids = self._tensors["top_ids"].view(num_samples, -1)
        self._top_logprobs = self._tensors["top_logprobs"].view(num_samples, -1)
        self._no_edits = self._allocate_edits(0)
        self._edits = self._no_edits
        self._masks = self._allocate_masks(0)

    def header(self) -> StepHeader:
        """The scalars of the step that was planned."""
        return StepHeader(*self._host["header"][:_HEADER_FIELDS].tolist())

    def forward_batch(self, header: StepHeader) -> ForwardBatch:
        """The planned step as the model takes it."""
        tokens, seqs, samples = header.num_tokens, header.num_seqs, header.num_samples
        return ForwardBatch(
            token_ids=self._input("token_ids", tokens),
            positions=self._input("positions", tokens),
            slot_mapping=self._input("slot_mapping", tokens),
            query_start=self._input("query_start", seqs + 1),
            seq_lens=self._input("seq_lens", seqs),
            rows=self._input("rows", seqs),
            block_table=self._on_device(self._block_table),
            logits_index=self._input("logits_index", samples),
            num_decodes=header.num_decodes,
            max_query_len=header.max_query_len,
            max_seq_len=header.max_seq_len,
            query_start_host=self._host["query_start"][: seqs + 1],
            seq_lens_host=self._host["seq_lens"][:seqs],
        )

    @property
    def table_shape(self) -> tuple[int, int]:
        """Of the block table: the most requests, the most blocks of one."""
        rows, columns = self._block_table.shape
        return rows, columns

    def inputs(self, header: StepHeader) -> StepInputs:
        """The planned step as it lies in host memory."""
        tokens, seqs, host = header.num_tokens, header.num_seqs, self._host
        return StepInputs(
            token_ids=host["token_ids"][:tokens],
            positions=host["positions"][:tokens],
            slot_mapping=host["slot_mapping"][:tokens],
            query_start=host["query_start"][: seqs + 1],
            seq_lens=host["seq_lens"][:seqs],
            rows=host["rows"][:seqs],
            block_table=self._block_table.numpy(),
            logits_index=host["logits_index"][: header.num_samples],
        )

    def source(self, header: StepHeader) -> Tensor:
        """Which samples of the step before are the step's first tokens: int32 [pending]."""
        return self._input("source", header.num_pending)

    def sampling_batch(self, header: StepHeader) -> SamplingBatch:
        """The planned step as the sampler takes it."""
        samples = header.num_samples
        sample, token, repetition, bias = self._logit_edits(header.num_edits)
        return SamplingBatch(
            temperature=self._input("temperature", samples),
            top_k=self._input("top_k", samples),
            top_p=self._input("top_p", samples),
            min_p=self._input("min_p", samples),
            uniform=self._input("uniform", samples),
            all_greedy=not header.flags & _RANDOM,
            any_top_k=bool(header.flags & _TOP_K),
            any_top_p=bool(header.flags & _TOP_P),
            any_min_p=bool(header.flags & _MIN_P),
            edit_sample=sample,
            edit_token=token,
            edit_repetition=repetition,
            edit_bias=bias,
            num_logprobs=header.num_logprobs,
            masks=self._token_masks(header.num_masks),
        )

    def prompt_rows(self, header: StepHeader) -> tuple[Tensor, Tensor]:
        """Of each row of logits that a prompt's logprobs need: its token's index, what follows it.

        Both int32 [R].
        """
        index, target = (torch.empty(header.num_prompt_rows, dtype=torch.int32) for _ in range(2))
        self._core.prompt_rows(self.slot, index.numpy(), target.numpy())
        return self._on_device(index), self._on_device(target)

    def take_prompt_logprobs(
        self, logprob: Tensor, rank: Tensor, top_ids: Tensor, top_logprobs: Tensor
    ) -> None:
        """Hand the rows' results to the core: float32 [R], int32 [R], int32 and float32 [R, K].

        All of them on the host.
        """
        arrays = (tensor.numpy() for tensor in (logprob, rank, top_ids, top_logprobs))
        self._core.take_prompt_logprobs(self.slot, *arrays)

    def write_samples(self, output: SampleOutput) -> None:
        """Put the step's tokens, and their logprobs if any, where the core reads them.

        A GPU does so after the call: whoever reads them waits for it.
        """
        count = len(output.sampled)
        _begin_copy(self._tensors["sampled"][:count], output.sampled)
        if output.logprob is None:
            return
        assert output.rank is not None
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        _begin_copy(self._tensors["logprob"][:count], output.logprob)
        _begin_copy(self._tensors["rank"][:count], output.rank)
        width = output.top_ids.shape[1]
        _begin_copy(self._top_ids[:count, :width], output.top_ids)
        _begin_copy(self._top_logprobs[:count, :width], output.top_logprobs)

    def _input(self, name: str, length: int) -> Tensor:
        return self._on_device(self._tensors[name][:length])

    def _on_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.to(self._device, non_blocking=True)

    @staticmethod
    def _allocate_edits(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        integers = (torch.zeros(length, dtype=torch.int32) for _ in range(2))
        floats = (torch.zeros(length, dtype=torch.float32) for _ in range(2))
        sample, token = integers
        repetition, bias = floats
        return sample, token, repetition, bias

    def _logit_edits(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if count == 0:
            return self._no_edits
        if len(self._edits[0]) < count:
            self._edits = self._allocate_edits(2 * count)
        written = self._core.logit_edits(self.slot, *(edit.numpy() for edit in self._edits))
        sample, token, repetition, bias = (self._on_device(edit[:written]) for edit in self._edits)
        return sample, token, repetition, bias

    def _allocate_masks(self, length: int) -> tuple[Tensor, Tensor]:
        pinned = self._device.type == "cuda"
        shapes = ((length,), (length, self._core.mask_words()))
        rows, bits = (torch.zeros(s, dtype=torch.int32, pin_memory=pinned) for s in shapes)
        return rows, bits

    def _token_masks(self, count: int) -> TokenMasks | None:
        if count == 0:
            return None
        if len(self._masks[0]) < count:
            self._masks = self._allocate_masks(min(2 * count, len(self._host["sampled"])))
        self._core.fill_masks(self.slot, *(part.numpy() for part in self._masks))
        rows, bits = (self._on_device(part[:count]) for part in self._masks)
        return TokenMasks(rows, bits)


def _begin_copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source, non_blocking=True)
