"""Any rank but 0: it computes its share of each step, and nothing else.

Rank 0 starts it as `python -m miniinfer.parallel.follower`, or torchrun starts the same program
everywhere and this is what the others do. It ends when rank 0 does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any, NoReturn, cast

import torch
from torch.distributed.distributed_c10d import Store

from ..backends import choose_backend
from ..child import Lines, ParentLink, log_to_stderr
from ..config import EngineArgs
from ..memory import free_memory
from ..model.loader import load_model
from ..model.read_config import read_model_config
from ..runner import ModelRunner
from ..source import resolve_model
from .communicator import Communicator
from .launch import LOOPBACK, join_store, launched_store
from .members import call_leader
from .model import ShardedLlamaModel
from .plan import PlanReader
from .settings import check_settings, free_share, rank_device, share_threads
from .shard import Shard, check_size
from .torchrun import Torchrun

__all__ = ["Follower", "follow_torchrun"]

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
"""How long the end of rank 0 may take to show after an operation with it has failed."""


class Link:
    """The line to rank 0, whose end is ours: 0 if it said so, 1 if it is gone."""

    def __init__(self, lines: Lines, first: list[dict[str, Any]]) -> None:
        self._lines = lines
        self._thread = threading.Thread(target=self._listen, args=(first,), daemon=True)
        self._thread.start()

    def _listen(self, lines: list[dict[str, Any]] | None) -> None:
        while lines is not None:
            if any("stop" in line for line in lines):
                os._exit(0)
            lines = self._lines.read()
        os._exit(1)

    def fail(self, reason: str) -> None:
        """Tell rank 0 why we end, unless it has ended."""
        if self._lines.write({"error": reason}):
            logger.debug("this rank has failed", exc_info=True)
        self._thread.join(_LAST_WORDS_SECONDS)


class Follower:
    """One rank's share of the model. `local_rank`, `local_size`: among those of this machine."""

    def __init__(self, args: EngineArgs, shard: Shard, local_rank: int, local_size: int) -> None:
        self._args = args
        self._shard = shard
        self._local_size = local_size
        self._device = rank_device(args, local_rank, local_size)
        check_settings(args, self._device)
        share_threads(args, self._device, local_size)

    def run(self, store: Store, host: str | None) -> NoReturn:
        """Load, then follow rank 0 until it ends us. Raises what goes wrong."""
        shard, device = self._shard, self._device
        communicator = Communicator(store, shard.rank, shard.size, device, host)
        backend = choose_backend(self._args, device, None)
        model = self._load()
        model.communicator = communicator
        communicator.least(free_share(free_memory(device), device, self._local_size))
        num_blocks, block_size, rows, columns = communicator.receive().tolist()
        ModelRunner(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=model.config.vocab_size,
            kv_dtype=backend.kv_dtype(self._args, model),
            backend=backend,
        )
        communicator.least(0)
        _compute(model, communicator, PlanReader((rows, columns), device))

    def _load(self) -> ShardedLlamaModel:
        args = self._args
        path = resolve_model(args.model, args.revision).path
        config = read_model_config(path)
        check_size(config, self._shard.size)
        dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
        positions = args.max_model_len or config.max_model_len
        model = load_model(
            path,
            dtype,
            self._device,
            False,
            max_positions=positions,
            shard=self._shard,
            random_weights=args.load_format == "dummy",
        )
        return cast("ShardedLlamaModel", model)


@torch.inference_mode()
def _compute(model: ShardedLlamaModel, communicator: Communicator, reader: PlanReader) -> NoReturn:
    while True:
        plan = reader.read(communicator.receive())
        hidden = model.forward(plan.batch)
        left = plan.num_prompt_rows
        while left:
            # No more than is computed at once, so the message holds until then.
            index = torch.from_numpy(communicator.receive().copy()).to(model.device)
            model.logits(hidden, index)
            left -= len(index)
        if plan.num_samples:
            model.logits(hidden, plan.batch.logits_index)


def _run(
    args: EngineArgs,
    shard: Shard,
    local: tuple[int, int],
    link: Link,
    store: Store,
    host: str | None,
) -> NoReturn:
    """Follow, and end the process. Threads that wait in native code keep it from ending itself."""
    try:
        Follower(args, shard, *local).run(store, host)
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        link.fail(f"rank {shard.rank} has failed: {reason}")
    logging.shutdown()
    os._exit(1)


def follow_torchrun(args: EngineArgs, launch: Torchrun) -> NoReturn:
    """Be one of the ranks that torchrun started. The process ends in here."""
    store = launched_store()
    link = Link(call_leader(launch, store), [])
    if threading.current_thread() is threading.main_thread():
        # Rank 0 is sent the same, and decides when all of us end.
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
    shard = Shard(launch.rank, launch.size)
    _run(args, shard, (launch.local_rank, launch.local_size), link, store, None)


def _follow_parent(arguments: list[str]) -> NoReturn:
    parent = ParentLink(arguments)
    first, others = parent.first()
    log_to_stderr(first["log_level"])
    link = Link(parent.lines, others)
    args = EngineArgs(**first["args"])
    rank, size = first["rank"], args.tensor_parallel_size
    store = join_store(first["port"], size)
    _run(args, Shard(rank, size), (rank, size), link, store, LOOPBACK)


if __name__ == "__main__":
    _follow_parent(sys.argv[1:])
