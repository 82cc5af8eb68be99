"""Tensor parallelism: one model, its weights split over several processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineArgs
    from ..model.config import ModelConfig
    from .leader import Leader

__all__ = ["lead_or_follow"]


def lead_or_follow(args: EngineArgs, path: Path, config: ModelConfig) -> Leader:
    """Be rank 0 of an engine. Where torchrun made this process another rank, it ends in here.

    `path`, `config`: the model, whole. Raises `ValueError` for settings that do not fit it and
    `ParallelError` if another rank does not start.
    """
    from .leader import Leader
    from .shard import check_size
    from .torchrun import torchrun

    size = args.tensor_parallel_size
    check_size(config, size)
    launch = torchrun()
    if launch is None:
        return Leader(args, path, None)
    if launch.size != size:
        raise ValueError(
            "tensor_parallel_size must be the number of processes that were launched "
            f"(WORLD_SIZE), {launch.size}, got {size}"
        )
    if launch.rank > 0:
        from .follower import follow_torchrun

        follow_torchrun(args, launch)
    return Leader(args, path, launch)
