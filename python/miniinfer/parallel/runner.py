"""The forward pass of a step over several processes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Backend
from ..runner import ModelRunner
from ..step import StepBuffers
from .leader import Leader
from .model import ShardedLlamaModel
from .plan import PlanPacker

__all__ = ["ParallelRunner"]


class ParallelRunner(ModelRunner):
    """Tells the other ranks of each step, computes its own share and samples. For rank 0."""

    model: ShardedLlamaModel

    def __init__(
        self,
        model: ShardedLlamaModel,
        leader: Leader,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        kv_dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        super().__init__(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            kv_dtype=kv_dtype,
            backend=backend,
        )
        self._leader = leader
        self._packer: PlanPacker | None = None
        self._prompt_rows = 0
        model.communicator = leader.communicator
        model.before_logits = self._announce

    def run(self, buffers: StepBuffers) -> None:
        """See `ModelRunner`."""
        with self._leader.together() as communicator:
            header = buffers.header()
            if self._packer is None:
                self._packer = PlanPacker(buffers.table_shape, self.cache.block_size)
            communicator.send(self._packer.pack(header, buffers.inputs(header)))
            self._prompt_rows = header.num_prompt_rows
            super().run(buffers)

    def _announce(self, index: Tensor) -> None:
        """Tell the others of logits that are not those of the plan: of tokens of prompts."""
        if self._prompt_rows:
            self._prompt_rows -= len(index)
            self._leader.communicator.send(index.cpu().numpy())
