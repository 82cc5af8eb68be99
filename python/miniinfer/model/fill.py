"""Checking and reading all weights, and saying how far that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .errors import ModelLoadError
from .weight_layout import WeightSlot

__all__ = ["Part", "Progress", "TensorList", "check_tensors", "fill", "reporter"]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor, from one thread at a time."""

Part = tuple[slice, ...]
"""What is taken of a tensor: a slice for each of its dimensions."""

Array = TypeVar("Array")


class TensorList(Protocol):
    """Tensors by the names they have in a Hugging Face checkpoint."""

    path: Path
    """Named in errors."""

    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""


def check_tensors(slots: Mapping[str, WeightSlot[Any]], source: TensorList) -> None:
    """Every tensor must be there and fit; others, like old rotary buffers, are not looked at.

    Raises `ModelLoadError`.
    """
    names = source.names()
    for name, slot in slots.items():
        if name not in names:
            hint = " and tie_word_embeddings is false" if name == "lm_head.weight" else ""
            raise ModelLoadError(f"{source.path}: tensor {name!r} is missing{hint}")
        shape = source.shape(name)
        if shape != slot.shape:
            raise ModelLoadError(
                f"{source.path}: tensor {name!r} has the shape {list(shape)}, "
                f"the configuration asks for {list(slot.shape)}"
            )


def fill(
    slots: Mapping[str, WeightSlot[Any]],
    read: Callable[[str, Any], None],
    threads: int,
    report: Progress,
) -> None:
    """Call `read` with each slot's name and target, from that many threads."""
    # The largest first, so that no thread is left alone with it at the end.
    ordered = sorted(slots.items(), key=lambda item: -item[1].target.nbytes)
    total = sum(slot.target.nbytes for slot in slots.values())
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(read, name, slot.target) for name, slot in ordered]
        try:
            for job, (_, slot) in zip(jobs, ordered, strict=True):
                job.result()
                done += slot.target.nbytes
                report(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def reporter(progress: Progress | bool | None) -> Iterator[Progress]:
    """What to report to: `progress`, a bar on stderr, or nothing; see `load_model`."""
    if callable(progress):
        yield progress
        return
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda done, total: None
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg] # generic in the stubs alone
        # Its thread would wake an idle server every ten seconds, long after the bar has gone.
        monitor_interval = 0

    with Bar(
        desc="loading weights",
        unit="B",
        unit_scale=True,
        delay=1.0 if progress is None else 0.0,
        leave=False,
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
