"""Which GPUs each of several engines of a machine has; needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import EngineArgs

__all__ = ["VISIBLE", "device_groups"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What CUDA, and ROCm as well, goes by."""

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_OTHER_GPUS = (Path("/dev/kfd"), Path("/dev/dxg"))
"""Of ROCm and of WSL, whose devices are not counted here."""


def device_groups(args: EngineArgs, engines: int) -> list[str] | None:
    """What `CUDA_VISIBLE_DEVICES` is to be for each of several engines.

    None where they take what is there: on a CPU, on a device that was named, and where there are
    fewer GPUs than engines of one process, which then share the first. Raises `ValueError` if
    engines of several processes cannot have a GPU for each.
    """
    size = args.tensor_parallel_size
    if engines == 1 or args.device not in ("auto", "cuda"):
        return None
    devices = _visible()
    if devices is None:
        if size == 1:
            return None
        raise ValueError(
            f"with {engines} engines (--engines) of {size} processes each "
            f"(--tensor-parallel-size), {VISIBLE} must name the machine's GPUs, "
            f"{engines * size} or more; it is not set"
        )
    if not devices and args.device == "auto":
        return None
    if len(devices) >= engines * size:
        starts = range(0, engines * size, size)
        return [",".join(devices[start : start + size]) for start in starts]
    if size == 1:
        return None
    raise ValueError(
        f"{engines} engines (--engines) of {size} processes each (--tensor-parallel-size) need "
        f"{engines * size} GPUs, and there are {len(devices)}: lower one of the two, or take "
        "--device cpu"
    )


def _visible() -> list[str] | None:
    """The names of the GPUs there are; None if there may be some that cannot be counted."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    if _NVIDIA.is_dir():
        return [str(number) for number, _ in enumerate(_NVIDIA.iterdir())]
    return None if any(path.exists() for path in _OTHER_GPUS) else []
