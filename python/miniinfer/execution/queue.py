"""Where the work of steps goes: a device that does it in order, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

__all__ = ["CudaQueue", "DeviceQueue", "InlineQueue", "on_device", "queue_for"]

Made = TypeVar("Made")


class DeviceQueue(Protocol):
    """Work for a device, done in the order in which it is given, perhaps after the call returned.

    What work raises is raised by the call that gave it, or by the wait for the next `fetch`.
    """

    def upload(self, make: Callable[[], Made]) -> Made:
        """Have inputs made and copied, beside the work that is queued; what comes later sees them.

        `make` is called at once: it may ask the core.
        """

    def run(self, work: Callable[[], None]) -> None:
        """Have something computed."""

    def fetch(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Have results copied to the host once all that was queued is done.

        Returns what to call before they are looked at: it waits for them.
        """


class InlineQueue:
    """Everything is done at once."""

    def upload(self, make: Callable[[], Made]) -> Made:
        """See `DeviceQueue`."""
        return make()

    def run(self, work: Callable[[], None]) -> None:
        """See `DeviceQueue`."""
        work()

    def fetch(self, copy: Callable[[], None]) -> Callable[[], None]:
        """See `DeviceQueue`."""
        copy()
        return _nothing


class CudaQueue:
    """A CUDA device: kernels on the current stream, copies in either direction on others.

    The caller keeps what was uploaded and what is fetched until the wait is over: memory that
    two streams use must not be given to others before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def upload(self, make: Callable[[], Made]) -> Made:
        """See `DeviceQueue`."""
        with torch.cuda.stream(self._up):
            made = make()
        torch.cuda.current_stream(self._device).wait_stream(self._up)
        return made

    def run(self, work: Callable[[], None]) -> None:
        """See `DeviceQueue`."""
        work()

    def fetch(self, copy: Callable[[], None]) -> Callable[[], None]:
        """See `DeviceQueue`."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        with torch.cuda.stream(self._down):
            copy()
            fetched.record()
        return fetched.synchronize


def queue_for(device: torch.device) -> DeviceQueue:
    """The queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else InlineQueue()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it a CUDA device is its thread's current one, which is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _nothing() -> None:
    pass
