"""How many blocks the KV cache gets: by the settings, or by what memory a device has left."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from .config import available_memory
from .execution.queue import on_device
from .model.kv_cache import KVCacheError

if TYPE_CHECKING:
    from .config import EngineArgs

__all__ = [
    "CudaProbe",
    "DeviceMemory",
    "MemoryProbe",
    "free_memory",
    "kv_cache_bytes",
    "num_kv_blocks",
]

_CPU_SHARE = 0.4
"""Share of the free memory that the KV cache may grow to where it shares the host's."""
_MOST_BLOCKS = 2**31 - 1
# Drivers and other programs need some of a device.
_MOST_UTILIZATION = 0.97
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device's memory looks like before the KV cache is there, in bytes."""

    total: int
    free: int
    """Weights and whatever else is there are not part of it."""
    step: int
    """What the largest step takes of it while it runs."""

    @property
    def used(self) -> int:
        """What is taken, the largest step included."""
        return self.total - self.free + self.step


class MemoryProbe(Protocol):
    """Looks at a device's memory."""

    def total(self) -> int:
        """Bytes that the device has."""

    def measure(self, step: Callable[[], object]) -> DeviceMemory:
        """Run a step and see what memory it needs."""


class CudaProbe:
    """A `MemoryProbe` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See `MemoryProbe`."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def measure(self, step: Callable[[], object]) -> DeviceMemory:
        """See `MemoryProbe`. What the step leaves behind, as libraries' workspaces, is not free."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        with on_device(self._device):
            step()
        torch.cuda.synchronize(self._device)
        # Reserved and not allocated: what lies in gaps is of no use to the cache.
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free, peak - torch.cuda.memory_reserved(self._device))


@dataclass(frozen=True, slots=True)
class HostProbe:
    """A `MemoryProbe` of main memory, where a step's share is small beside what may stay free."""

    def total(self) -> int:
        """See `MemoryProbe`."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def measure(self, step: Callable[[], object]) -> DeviceMemory:
        """See `MemoryProbe`. Nothing is run."""
        return DeviceMemory(self.total(), available_memory(), 0)


def num_kv_blocks(
    args: EngineArgs,
    device: torch.device,
    block_bytes: int,
    max_model_len: int,
    step: Callable[[], object],
    least_free: int | None = None,
    probe: MemoryProbe | None = None,
) -> int:
    """The blocks of an engine's cache: `num_kv_blocks`, or what `kv_cache_memory`, a GPU's
    `gpu_memory_utilization` or a share of the host's free memory has room for.

    `block_bytes`: of a block, over all layers. `step`: computes the largest step there may be; it
    is run only on a GPU whose memory decides. `least_free`: what any of the engine's processes has
    free, where there are several. Raises `KVCacheError` or `ValueError`, saying what
    there is and which setting to change.
    """
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    on_gpu = device.type == "cuda"
    probe = probe or (CudaProbe(device) if on_gpu else HostProbe())
    memory = args.kv_cache_memory
    if memory is not None:
        _check_asked(memory, probe.total(), device)
    else:
        found = _measure(probe, step, args)
        if least_free is not None:
            found = replace(found, free=min(found.free, least_free))
        if on_gpu:
            memory = kv_cache_bytes(found, args, device, block_bytes)
        else:
            memory = int(_CPU_SHARE * found.free)
    if memory < block_bytes:
        raise ValueError(
            f"one KV block takes {block_bytes} bytes, beyond the {memory} bytes there are for the "
            "KV cache; raise kv_cache_memory or lower block_size"
        )
    # More than all requests can fill is of use to the prefix cache alone: twice that is plenty.
    longest = -(-max_model_len // args.block_size)
    return min(memory // block_bytes, 2 * args.max_num_seqs * longest, _MOST_BLOCKS)


def free_memory(device: torch.device) -> int:
    """Bytes of memory that a device has left."""
    if device.type != "cuda":
        # Devices without memory of their own share the host's.
        return available_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def kv_cache_bytes(
    memory: DeviceMemory, args: EngineArgs, device: torch.device, block_bytes: int
) -> int:
    """What `gpu_memory_utilization` leaves for the cache, in bytes: room for a block at least.

    Raises `KVCacheError` saying what would fit with which setting.
    """
    share = args.gpu_memory_utilization
    step_tokens = args.batched_tokens(on_cpu=device.type == "cpu")
    left = int(share * memory.total) - memory.used
    if left >= block_bytes:
        return left
    most = int(_MOST_UTILIZATION * memory.total) - memory.used
    tokens = max(0, most) // block_bytes * args.block_size
    if share < _MOST_UTILIZATION and tokens:
        advice = (
            f"raise gpu_memory_utilization: {_MOST_UTILIZATION} would leave room for {tokens} "
            "tokens; or lower max_num_batched_tokens, "
            f"which is {step_tokens}, or max_num_seqs, which is {args.max_num_seqs}"
        )
    elif memory.step > memory.total - memory.free:
        advice = (
            f"lower max_num_batched_tokens, which is {step_tokens}, "
            f"or max_num_seqs, which is {args.max_num_seqs}"
        )
    else:
        advice = (
            "end what else runs on the device, or take a smaller model, a larger device or several "
            f"(not even a gpu_memory_utilization of {_MOST_UTILIZATION} would do)"
        )
    raise KVCacheError(
        f"no memory is left for the KV cache on {device}: gpu_memory_utilization {share} of "
        f"{_gib(memory.total)} is {_gib(share * memory.total)}, of which the weights and all else "
        f"that is there take {_gib(memory.total - memory.free)} and a step of "
        f"{step_tokens} tokens {_gib(memory.step)}, and one block needs "
        f"{_gib(block_bytes)}; {advice}"
    )


def _check_asked(memory: int, total: int, device: torch.device) -> None:
    if memory > total:
        owner = "this machine" if device.type == "cpu" else str(device)
        raise KVCacheError(
            f"kv_cache_memory asks for {_gib(memory)}, but {owner} has {_gib(total)} of memory in "
            "all; lower kv_cache_memory, or leave it out to have it chosen"
        )


def _measure(probe: MemoryProbe, step: Callable[[], object], args: EngineArgs) -> DeviceMemory:
    try:
        return probe.measure(step)
    except torch.OutOfMemoryError as error:
        step_tokens = args.batched_tokens(on_cpu=False)
        reason = str(error).partition("\n")[0]
        raise KVCacheError(
            f"a step of {step_tokens} tokens does not fit beside the weights "
            f"({reason}); lower max_num_batched_tokens, or max_num_seqs, which is "
            f"{args.max_num_seqs}"
        ) from error


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
