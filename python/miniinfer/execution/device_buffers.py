"""The inputs of decode steps where CUDA graphs read them: at addresses that never change."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.batch import ForwardBatch

__all__ = ["DecodeInputs"]


class DecodeInputs:
    """The inputs of up to `max_size` decodes.

    Rows that no request fills are requests of one token, whose keys and values go to
    `scratch_block`, which belongs to nobody. `num_rows` and `max_blocks`: the shape of the
    engine's block table.
    """

    def __init__(
        self,
        max_size: int,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        def integers(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self._padding = {"seq_lens": 1, "slot_mapping": scratch_block * block_size}
        self._padding |= {"token_ids": 0, "positions": 0, "rows": num_rows}
        self._tensors = {
            name: integers(
                max_size,
                value=value,
                dtype=torch.int64 if name == "slot_mapping" else torch.int32,
            )
            for name, value in self._padding.items()
        }
        self._block_table = integers(num_rows + 1, max_blocks)
        self._block_table[num_rows] = scratch_block
        self._places = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        self._places_host = np.arange(max_size + 1, dtype=np.int32)
        self._seq_lens_host = np.ones(max_size, dtype=np.int32)
        self._used = 0

    def fill(self, batch: ForwardBatch) -> None:
        """Take in a step of decodes."""
        count = batch.num_decodes
        for name, tensor in self._tensors.items():
            tensor[:count].copy_(getattr(batch, name))
            if count < self._used:
                tensor[count : self._used] = self._padding[name]
        self._block_table[:-1].copy_(batch.block_table)
        self._seq_lens_host[:count] = batch.seq_lens_host
        self._seq_lens_host[count : self._used] = 1
        self._used = count

    def batch(self, size: int, max_seq_len: int) -> ForwardBatch:
        """The first `size` rows, as a step whose longest context has up to `max_seq_len` tokens."""
        tensors = {name: tensor[:size] for name, tensor in self._tensors.items()}
        return ForwardBatch(
            **tensors,
            query_start=self._places[: size + 1],
            block_table=self._block_table,
            logits_index=self._places[:size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_start_host=self._places_host[: size + 1],
            seq_lens_host=self._seq_lens_host[:size],
        )
