"""The paged cache of keys and values."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from miniinfer.config import available_memory

__all__ = ["KVCache", "KVCacheError", "bytes_per_block"]


_SCALE_BYTES = 4


class KVCacheError(RuntimeError):
    """The cache does not fit the memory there is."""


def bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    head_bytes = head_dim * dtype.itemsize + (_SCALE_BYTES if dtype is torch.int8 else 0)
    return 2 * num_layers * block_size * num_kv_heads * head_bytes


class KVCache:
    """Keys and values of every layer, in blocks.

    `keys[layer]` and `values[layer]`: [num_blocks, block_size, num_kv_heads, head_dim] of `dtype`,
    uninitialised. `scales[layer]`: for int8 alone, what 1 in the keys and in the values is worth,
    float32 [num_blocks, block_size, num_kv_heads] each. `tensor_scales[layer]`: for 8-bit floats
    alone, the same for the whole layer, float32 [1] each, and `scale_numbers[layer]` as numbers;
    from the argument `layer_scales`, or 1.

    Raises `KVCacheError`, with the numbers and the settings to change, when the memory cannot be
    had, and `ValueError` for a size that is not positive.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layer_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                "the key-value cache needs at least one block of one token, "
                f"not {num_blocks} blocks of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(
            num_layers, block_size, num_kv_heads, head_dim, dtype
        )
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self._check_host_memory(torch.device(device))
        try:
            self.keys = _allocate(num_layers, shape, dtype, device)
            self.values = _allocate(num_layers, shape, dtype, device)
            self.scales: list[tuple[Tensor, Tensor]] | None = None
            if dtype is torch.int8:
                pairs = [_allocate(2, shape[:3], torch.float32, device) for _ in range(num_layers)]
                self.scales = [(keys, values) for keys, values in pairs]
        except RuntimeError as error:
            reason = f"{device} refused it ({str(error).splitlines()[0]})"
            raise self._error(reason, _free_bytes(torch.device(device))) from error
        self.scale_numbers: list[tuple[float, float]] = []
        if dtype is torch.float8_e4m3fn:
            self.scale_numbers = list(layer_scales or [(1.0, 1.0)] * num_layers)
        self.tensor_scales = [
            (torch.tensor([key], device=device), torch.tensor([value], device=device))
            for key, value in self.scale_numbers
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block

    def _check_host_memory(self, device: torch.device) -> None:
        """Refuse what a host cannot hold: it grants any size, and fails when pages are used."""
        if device.type != "cpu":
            return
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.num_bytes > physical:
            raise self._error(
                f"this machine has {physical / 2**30:.1f} GiB of memory", available_memory()
            )

    def _error(self, reason: str, free: int | None) -> KVCacheError:
        fits = ""
        if free is not None:
            blocks = free // self.bytes_per_block
            fits = f"{blocks} blocks ({blocks * self.block_size} tokens) would fit now; "
        return KVCacheError(
            f"cannot allocate the key-value cache: {self.num_blocks} blocks of {self.block_size} "
            f"tokens need {self.num_bytes / 2**30:.1f} GiB, but {reason}; {fits}"
            "lower num_kv_blocks (--num-kv-blocks) or kv_cache_memory (--kv-cache-memory)"
        )


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that a device has left, if it says."""
    if device.type == "cpu":
        return available_memory()
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def _allocate(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
