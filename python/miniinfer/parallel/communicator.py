"""What the processes of one engine send each other in a step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["Communicator", "Words"]

_c10d: Any = distributed
"""Whose own types leave most of it out."""

Words = npt.NDArray[np.int32]

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
"""How long one process may wait for another within a step."""

_LOAD_TIMEOUT = timedelta(hours=1)
"""How long one may wait for another to load its weights. Its death is noticed at once."""

_FOREVER = timedelta(days=3650)

_FIRST_WORDS = 4096
"""Words of a message's first part, 16 KiB: that many hold the plan of most decode steps."""


class Communicator:
    """The collective operations of ranks 0 to `size` - 1; all must call the same ones in turn.

    Tensors on a GPU go by NCCL, all else by gloo. The groups are this object's own, so that a
    program's default group, and other engines in it, are left alone. `host`: the address that gloo
    listens on; None leaves the choice to it. Raises `RuntimeError` when another process is gone or
    takes too long.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        host: str | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._control: Any = _gloo(PrefixStore("control", store), rank, size, host)
        self._tensors: Any = self._control
        if device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            nccl = PrefixStore("tensors", store)
            self._tensors = _c10d.ProcessGroupNCCL(nccl, rank, size, options)
        self._first = torch.zeros(_FIRST_WORDS, dtype=torch.int32)
        # Connects everybody, so that what cannot be reached shows here.
        self.sum(torch.zeros(1, device=device))

    def send(self, words: Words) -> None:
        """Send a message from rank 0 to all others."""
        first, count = self._first.numpy(), len(words)
        first[0] = count
        head = min(count, _FIRST_WORDS - 1)
        first[1 : head + 1] = words[:head]
        self._broadcast(self._first, COLLECTIVE_TIMEOUT)
        if head < count:
            self._broadcast(torch.from_numpy(words[head:]), COLLECTIVE_TIMEOUT)

    def receive(self) -> Words:
        """The next message from rank 0, however long that takes. It holds until the one after."""
        self._broadcast(self._first, _FOREVER)
        first = self._first.numpy()
        count = int(first[0])
        if count < _FIRST_WORDS:
            return first[1 : count + 1]
        words = np.empty(count, np.int32)
        words[: _FIRST_WORDS - 1] = first[1:]
        self._broadcast(torch.from_numpy(words[_FIRST_WORDS - 1 :]), COLLECTIVE_TIMEOUT)
        return words

    def sum(self, tensor: Tensor) -> Tensor:
        """Add all processes' tensors of one shape up, in place and in every process."""
        self._tensors.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """All processes' tensors of one shape, in the order of ranks; rank 0 alone gets them."""
        options = _c10d.GatherOptions()
        options.rootRank = 0
        if self._rank > 0:
            self._tensors.gather([], [tensor], options).wait()
            return None
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._tensors.gather([parts], [tensor], options).wait()
        return parts

    def least(self, value: int) -> int:
        """The smallest of all processes' values; for when they load."""
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        options.timeout = _LOAD_TIMEOUT
        values = torch.tensor([value])
        self._control.allreduce([values], options).wait()
        return int(values)

    def abort(self) -> None:
        """Have operations on a GPU that wait for a process that is gone end, from any thread."""
        tensors = self._tensors
        if tensors is not None and tensors is not self._control:
            tensors.abort()

    def close(self) -> None:
        """Let go of the groups: gloo's threads look for work all the time while there are any.

        What is under way ends first; later operations raise.
        """
        self._control = self._tensors = None

    def _broadcast(self, tensor: Tensor, timeout: timedelta) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        self._control.broadcast([tensor], options).wait()


def _gloo(store: Store, rank: int, size: int, host: str | None) -> Any:
    if host is None:
        return _c10d.ProcessGroupGloo(store, rank, size, COLLECTIVE_TIMEOUT)
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = COLLECTIVE_TIMEOUT
    return _c10d.ProcessGroupGloo(store, rank, size, options)
