"""The forward pass of one part of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from ..model.config import ModelConfig
from ..model.llama import LlamaModel
from ..model.weight_layout import ModelWeights
from .communicator import Communicator
from .shard import Shard

__all__ = ["ShardedLlamaModel"]


class ShardedLlamaModel(LlamaModel):
    """A decoder that computes its share of each layer and adds it up with the others'.

    `config`: of the part, see `Shard.config`. All processes must call `forward` with the same
    batch. Until `communicator` is set each computes its share alone, which shows how long that
    takes and what memory it needs, and no more. `before_logits` is called with the indices of each
    `logits`, before anything is exchanged for them.
    """

    communicator: Communicator | None = None
    before_logits: Callable[[Tensor], None] | None = None

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_positions: int | None,
        weights: ModelWeights[Tensor],
    ) -> None:
        super().__init__(config, dtype, device, max_positions=max_positions, weights=weights)
        self._vocabulary_width = shard.vocabulary_width(config.vocab_size)
        if weights.lm_head is None:
            self.lm_head = self.embedding[shard.vocabulary(config.vocab_size)]

    def _inward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = super()._inward(x, weight, bias)
        return own if self.communicator is None else self.communicator.sum(own)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logits_index: Tensor) -> Tensor:
        """See `LlamaModel`. Rank 0 gets them all, the others only their own: [N, part]."""
        if self.before_logits is not None:
            self.before_logits(logits_index)
        own = linear(hidden.index_select(0, logits_index), self.lm_head)
        if self.communicator is None:
            return pad(own, (0, self.config.vocab_size - own.shape[1])).float()
        missing = self._vocabulary_width - own.shape[1]
        parts = self.communicator.gather(pad(own, (0, missing)) if missing else own)
        if parts is None:
            return own
        return torch.cat(parts, dim=1)[:, : self.config.vocab_size].float()
