"""Rank 0 of a tensor-parallel engine: it has the core, the text and the server."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from ..config import EngineArgs
from .communicator import Communicator
from .errors import ParallelError
from .launch import LOOPBACK, launched_store, serve_store
from .members import Member, SpawnedMember, accept_members
from .settings import check_settings, free_share, rank_device, share_threads
from .shard import Shard
from .torchrun import Torchrun

__all__ = ["Leader"]

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0
"""How long a process may take to end once it was told to."""

_MOST_ENTRIES = 2**31 - 1
"""Of the block table: their places are sent as int32."""

_LAST_WORDS_SECONDS = 2.0
"""How long after an operation has failed the news may take of who is gone."""


class Leader:
    """Starts the other ranks, or meets those that torchrun started, and notices their end.

    `path`: the model. Raises `ValueError` for settings that exclude each other and `ParallelError`
    if another rank does not start.
    """

    def __init__(self, args: EngineArgs, path: Path, launch: Torchrun | None) -> None:
        size = args.tensor_parallel_size
        self.local_size = size if launch is None else launch.local_size
        self.device = rank_device(args, 0 if launch is None else launch.local_rank, self.local_size)
        check_settings(args, self.device)
        share_threads(args, self.device, self.local_size)
        self.shard = Shard(0, size)
        self._lock = threading.Lock()
        self._closed = False
        self._reason: str | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._is_lost = threading.Event()
        self._news: queue.SimpleQueue[Communicator | Exception | None] = queue.SimpleQueue()
        self._communicator: Communicator | None = None
        self.members: list[Member] = []
        try:
            self._start(launch, args, path)
        except BaseException:
            self.close()
            raise
        kind = "torch in float32, not the kernels for CPUs" if self._is_cpu else "NCCL"
        logger.info("tensor parallelism over %d processes: %s", size, kind)

    @property
    def _is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def communicator(self) -> Communicator:
        """What joins the ranks."""
        assert self._communicator is not None, "set before anybody sees a leader"
        return self._communicator

    def _start(self, launch: Torchrun | None, args: EngineArgs, path: Path) -> None:
        store: Store
        if launch is None:
            store, port = serve_store(self.shard.size)
            # The path: a hub id would be looked up by every rank.
            known = dataclasses.replace(args, model=str(path), revision=None)
            message = {
                "args": known.as_dict(),
                "port": port,
                "log_level": logging.getLogger().getEffectiveLevel(),
            }
            for rank in range(1, self.shard.size):
                self.members.append(SpawnedMember(rank, message))
        else:
            store = launched_store()
            self.members.extend(accept_members(launch, store))
        for member in self.members:
            name = f"rank {member.rank}"
            threading.Thread(target=self._watch, args=(member,), name=name, daemon=True).start()
        host = LOOPBACK if launch is None else None
        connect = threading.Thread(target=self._connect, args=(store, host), daemon=True)
        connect.start()
        news = self._news.get()
        if isinstance(news, Exception):
            raise ParallelError(f"the ranks cannot reach each other: {news}") from news
        self.check()
        self._communicator = news

    def _connect(self, store: Store, host: str | None) -> None:
        """In a thread: it waits for the others, whose end it would not see."""
        try:
            self._news.put(Communicator(store, 0, self.shard.size, self.device, host))
        except Exception as error:
            self._is_lost.wait(_LAST_WORDS_SECONDS)
            self._news.put(error)

    def _watch(self, member: Member) -> None:
        said: str | None = None
        try:
            while (lines := member.lines.read()) is not None:
                for line in lines:
                    said = line.get("error", said)
        except (ValueError, AttributeError) as error:
            said = f"rank {member.rank} is not understood: {error}"
        self._lose(said or member.ended())

    def _lose(self, reason: str) -> None:
        """Note why the ranks can do nothing more together, the first time; from any thread."""
        with self._lock:
            if self._closed or self._reason is not None:
                return
            self._reason = reason
            on_lost = self._on_lost
        self._is_lost.set()
        self._news.put(None)
        if self._communicator is not None:
            self._communicator.abort()
        if on_lost is not None:
            on_lost(reason)

    def tell(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called, once, when another rank is gone; on a thread of its own."""
        with self._lock:
            self._on_lost = on_lost
            reason = self._reason
        if reason is not None:
            on_lost(reason)

    def check(self) -> None:
        """Raise `ParallelError` if the ranks can do nothing more together."""
        if self._reason is not None:
            raise ParallelError(self._reason)

    @contextmanager
    def together(self) -> Iterator[Communicator]:
        """What all ranks do in step. After an error in it they are not in step any more.

        Raises `ParallelError`, which says who is gone if anybody is.
        """
        self.check()
        try:
            yield self.communicator
        except Exception as error:
            self._is_lost.wait(_LAST_WORDS_SECONDS)
            self._lose(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise ParallelError(self._reason or "the engine was closed") from error
        except BaseException:
            self._lose("a step was interrupted on rank 0, which leaves the other ranks behind")
            raise

    def share_memory(self, free: int) -> int:
        """Of the free memory of this machine or device, what every rank can have."""
        with self.together() as communicator:
            return communicator.least(free_share(free, self.device, self.local_size))

    def open(self, num_blocks: int, block_size: int, table_shape: tuple[int, int]) -> None:
        """Have the others allocate their cache, and wait until they have.

        Raises `ValueError` for a block table too large for its entries to be told apart.
        """
        entries = table_shape[0] * table_shape[1]
        if entries > _MOST_ENTRIES:
            raise ValueError(
                f"max_num_seqs times the blocks of max_model_len must be at most {_MOST_ENTRIES} "
                f"with tensor parallelism, got {entries}"
            )
        with self.together() as communicator:
            sizes = torch.tensor((num_blocks, block_size, *table_shape), dtype=torch.int32)
            communicator.send(sizes.numpy())
            communicator.least(0)

    def close(self) -> None:
        """End the other ranks; from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for member in self.members:
            member.lines.write({"stop": True})
        for member in self.members:
            member.close(_PATIENCE_SECONDS)
        if self._communicator is not None:
            self._communicator.close()
