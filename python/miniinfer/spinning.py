"""How long torch's threads look for work before they sleep."""

from __future__ import annotations

import os

__all__ = ["spin_briefly"]


def spin_briefly() -> None:
    """Have torch's CPU threads sleep soon when they wait for each other; for torch not yet there.

    GNU OpenMP, which torch's wheels for Linux bring, spins at every barrier for milliseconds, and
    when other programs want the cores too, a thread spins away the time of the one it waits for.
    A decode step of the built-in model, two threads on two cores at a load of 5 to 8, took 580 to
    1500 ms by default and 90 to 160 ms with 1000 spins, as with one thread. That many take some
    tens of microseconds, enough for the short waits within a step. The kernels for CPUs have
    threads of their own, which want the core that a spinning thread holds: 512 rows of the built-in
    model's matrices took them 376 ms by default and 250 with 1000 spins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
