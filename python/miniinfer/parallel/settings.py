"""What the settings of an engine come to in one of several processes."""

from __future__ import annotations

import torch

from ..config import EngineArgs

__all__ = ["check_settings", "free_share", "rank_device", "share_threads"]

_ON_A_CPU = {
    "dtype": ("auto", "float32"),
    "quantization": ("auto", "none"),
    "attention_backend": ("auto", "torch"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
}
"""The package's kernels for CPUs know no parts of a model: it runs on torch, in float32."""


def rank_device(args: EngineArgs, local_rank: int, local_size: int) -> torch.device:
    """The device of one of a machine's processes.

    Raises `ValueError` for a device that not all can have.
    """
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    size = args.tensor_parallel_size
    if name != "cuda":
        raise ValueError(
            f"device must be auto, cpu or cuda with a tensor_parallel_size of {size}, got {name!r}"
        )
    count = torch.cuda.device_count()
    if local_size > count:
        raise ValueError(
            "tensor_parallel_size must be at most the number of CUDA devices of a machine, "
            f"{count}, got {local_size}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_settings(args: EngineArgs, device: torch.device) -> None:
    """Raise `ValueError` for settings that need the kernels for CPUs."""
    if device.type != "cpu":
        return
    for name, choices in _ON_A_CPU.items():
        value = getattr(args, name)
        if value not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(choices)} on a CPU with a tensor_parallel_size "
                f"of {args.tensor_parallel_size}, got {value}"
            )


def free_share(free: int, device: torch.device, local_size: int) -> int:
    """What one process may have of `free` bytes: those of a machine share its main memory."""
    return free // local_size if device.type == "cpu" else free


def share_threads(args: EngineArgs, device: torch.device, local_size: int) -> None:
    """Have the processes of a machine share its cores, unless the settings say how many to use."""
    if device.type == "cpu" and args.threads is None:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    elif args.threads is not None:
        torch.set_num_threads(args.threads)
