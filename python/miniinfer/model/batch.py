"""One step's work, as flat arrays: the interface between the engine and the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["ForwardBatch"]


@dataclass(slots=True)
class ForwardBatch:
    """A packed batch of B requests with T new tokens together, decodes first, then prefill chunks.

    Tensors are on the model's device. `seq_lens` counts the tokens of this step, so that the tokens
    of request i are at positions `seq_lens[i] - chunk length` to `seq_lens[i] - 1`. Every slot in
    `slot_mapping` must be a real one. Entries of `block_table` past the end of a sequence are never
    read.
    """

    token_ids: Tensor
    """int32 [T]"""
    positions: Tensor
    """int32 [T]: each token's position in its sequence."""
    slot_mapping: Tensor
    """int64 [T]: where the token's keys and values go, block id * block size + offset."""
    query_start: Tensor
    """int32 [B + 1]: prefix sums of the chunk lengths."""
    seq_lens: Tensor
    """int32 [B]: the context's length, this step's tokens included."""
    rows: Tensor
    """int32 [B]: each request's row of the block table."""
    block_table: Tensor
    """int32 [S, max_blocks]: the block ids of each sequence, in order."""
    logits_index: Tensor
    """int32 [N]: the places in [0, T) whose logits are needed."""
    num_decodes: int
    """The first `num_decodes` requests have exactly one token each."""
    max_query_len: int
    max_seq_len: int
    query_start_host: npt.NDArray[np.int32]
    """`query_start` in host memory."""
    seq_lens_host: npt.NDArray[np.int32]
    """`seq_lens` in host memory."""
