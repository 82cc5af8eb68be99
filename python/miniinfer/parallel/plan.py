"""A planned step as one flat message."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..model.batch import ForwardBatch
from ..step import StepHeader, StepInputs
from .communicator import Words

__all__ = ["PlanPacker", "PlanReader", "ReceivedPlan"]

_NUM_SCALARS = 8


class PlanPacker:
    """Packs the steps of rank 0.

    `table_shape`: of the block table, [S, M]. Of the table only the entries that the others do not
    have yet are sent.
    """

    def __init__(self, table_shape: tuple[int, int], block_size: int) -> None:
        self._sent = np.full(table_shape, -1, np.int32)
        self._block_size = block_size

    def pack(self, header: StepHeader, inputs: StepInputs) -> Words:
        """The step's message: int32, laid out as `PlanReader` takes it."""
        places, blocks = self._changes(header, inputs)
        scalars = (
            header.num_tokens,
            header.num_seqs,
            header.num_decodes,
            header.num_samples,
            header.max_query_len,
            header.max_seq_len,
            header.num_prompt_rows,
            len(places),
        )
        return np.concatenate(
            (
                np.array(scalars, np.int32),
                inputs.token_ids,
                inputs.positions,
                inputs.slot_mapping.view(np.int32),
                inputs.query_start,
                inputs.seq_lens,
                inputs.rows,
                inputs.logits_index,
                places,
                blocks,
            )
        )

    def _changes(self, header: StepHeader, inputs: StepInputs) -> tuple[Words, Words]:
        """Where in the flat table something new stands that is read in this step, and what."""
        columns = -(-header.max_seq_len // self._block_size)
        current = inputs.block_table[inputs.rows, :columns]
        request, column = np.nonzero(current != self._sent[inputs.rows, :columns])
        places = inputs.rows[request] * self._sent.shape[1] + column.astype(np.int32)
        blocks = current[request, column]
        self._sent.reshape(-1)[places] = blocks
        return places, blocks


@dataclass(frozen=True, slots=True)
class ReceivedPlan:
    """What a follower computes: the batch, and of how many tokens of prompts the logits."""

    batch: ForwardBatch
    num_samples: int
    num_prompt_rows: int


class PlanReader:
    """Reads what `PlanPacker` packed, and keeps the block table."""

    def __init__(self, table_shape: tuple[int, int], device: torch.device) -> None:
        self._device = device
        self._table = torch.zeros(table_shape, dtype=torch.int32)

    def read(self, words: Words) -> ReceivedPlan:
        """The step of a message, whose memory it may share."""
        tokens, seqs, decodes, samples, query_len, seq_len, prompt_rows, changes = words[
            :_NUM_SCALARS
        ].tolist()
        lengths = (tokens, tokens, 2 * tokens, seqs + 1, seqs, seqs, samples, changes, changes)
        ends = list(accumulate(lengths, initial=_NUM_SCALARS))
        arrays = [words[start:end] for start, end in pairwise(ends)]
        ids, positions, slots, query_start, seq_lens, rows, index, places, blocks = arrays
        self._table.numpy().reshape(-1)[places] = blocks
        batch = ForwardBatch(
            token_ids=self._tensor(ids),
            positions=self._tensor(positions),
            # Copied: in the message it may not be aligned for 64 bits.
            slot_mapping=torch.from_numpy(slots.copy().view(np.int64)).to(self._device),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(seq_lens),
            rows=self._tensor(rows),
            block_table=self._table.to(self._device),
            logits_index=self._tensor(index),
            num_decodes=decodes,
            max_query_len=query_len,
            max_seq_len=seq_len,
            query_start_host=query_start,
            seq_lens_host=seq_lens,
        )
        return ReceivedPlan(batch, samples, prompt_rows)

    def _tensor(self, words: Words) -> Tensor:
        return torch.from_numpy(words).to(self._device)
