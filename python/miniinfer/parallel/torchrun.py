"""Whether this process is one of several that torchrun, or a scheduler like it, has started."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Torchrun", "torchrun"]

_WHO = ("RANK", "WORLD_SIZE")
_WHERE = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun, or whoever sets the same variables, says of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    """Of the machine of rank 0."""


def torchrun() -> Torchrun | None:
    """The launch that this process is one of several of; None for a process of its own.

    Raises `ValueError` for variables that make no sense.
    """
    if any(name not in os.environ for name in _WHO):
        return None
    size = _variable("WORLD_SIZE", None, 1, 2**16)
    if size == 1:
        return None
    missing = [name for name in _WHERE if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment has RANK and a WORLD_SIZE of {size}, and lacks "
            f"{' and '.join(missing)}: set all four, as torchrun does, or none"
        )
    _variable("MASTER_PORT", None, 0, 2**16 - 1)
    rank = _variable("RANK", None, 0, size - 1)
    local_size = _variable("LOCAL_WORLD_SIZE", size, 1, size)
    local_rank = _variable("LOCAL_RANK", rank, 0, local_size - 1)
    return Torchrun(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"])


def _variable(name: str, default: int | None, low: int, high: int) -> int:
    text = os.environ.get(name, default)
    try:
        value = int(text)  # type: ignore[arg-type] # None is an error as any other text is
    except (TypeError, ValueError):
        value = low - 1
    if not low <= value <= high:
        raise ValueError(
            f"the environment's {name} must be an integer from {low} to {high}, got {text!r}"
        )
    return value
