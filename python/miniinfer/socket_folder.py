"""The folder of the sockets between processes, which does not outlive its owner for long.

An owner that is killed cannot remove it. So each holds a lock on a file in its folder, and whoever
makes one next removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["SocketFolder"]

_PREFIX = "miniinfer-sockets-"
_LOCK = "owner"


class SocketFolder:
    """A new folder for nobody but us, until `remove`."""

    def __init__(self) -> None:
        _remove_ownerless()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # It gets its name with the lock held: one without a holder is always left behind.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_ownerless() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Of other users, or removed meanwhile by its owner or by another like us.
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
