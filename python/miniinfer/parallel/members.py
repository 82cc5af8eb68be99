"""The other processes of an engine, as rank 0 knows them: a line to each, and its end.

That line is beside the collective operations, which may wait long for a process that is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from ..child import Child, Lines, exit_reason
from .errors import ParallelError
from .launch import START_TIMEOUT
from .torchrun import Torchrun

__all__ = ["Member", "RemoteMember", "SpawnedMember", "accept_members", "call_leader"]

logger = logging.getLogger(__name__)

_MODULE = "miniinfer.parallel.follower"
_NOTE = "link"
_INTRODUCTION_SECONDS = 5.0
_EXIT_SECONDS = 5.0
"""How long after the end of its line a process may take to be gone."""

# A machine that is switched off closes no connection.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Member(Protocol):
    """A process of another rank."""

    rank: int
    lines: Lines

    def ended(self) -> str:
        """How it ended, once its line has."""

    def close(self, patience: float) -> None:
        """Let it end by itself for so many seconds, then have nothing more to do with it."""


class SpawnedMember:
    """One that we started; `message` is what it must know."""

    def __init__(self, rank: int, message: dict[str, Any]) -> None:
        self.rank = rank
        self._code = 0
        self._gone = threading.Event()
        self._child = Child(_MODULE, self._on_exit)
        self.lines = self._child.lines
        self._child.tell(rank=rank, **message)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def _on_exit(self, code: int) -> None:
        self._code = code
        self._gone.set()

    def ended(self) -> str:
        """See `Member`."""
        if not self._gone.wait(_EXIT_SECONDS):
            return f"rank {self.rank} has left"
        return exit_reason(f"rank {self.rank}", self._code)

    def close(self, patience: float) -> None:
        """See `Member`."""
        self._child.close(patience)


class RemoteMember:
    """One that torchrun started, perhaps on another machine."""

    def __init__(self, rank: int, lines: Lines) -> None:
        self.rank = rank
        self.lines = lines

    def ended(self) -> str:
        """See `Member`."""
        return f"rank {self.rank} has gone"

    def close(self, patience: float) -> None:
        """See `Member`."""
        link = self.lines.socket
        with contextlib.suppress(OSError):
            # Whoever reads its line, here and there, sees the end of it.
            link.shutdown(socket.SHUT_WR)
            link.settimeout(patience)
            while link.recv(2**16):
                pass
        link.close()


def accept_members(launch: Torchrun, store: Store) -> list[RemoteMember]:
    """Rank 0's side: the lines of all others, once they have called.

    Raises `ParallelError` if not all do in time.
    """
    family, _, _, _, address = socket.getaddrinfo(launch.address, 0, type=socket.SOCK_STREAM)[0]
    deadline = time.monotonic() + START_TIMEOUT.total_seconds()
    members: dict[int, RemoteMember] = {}
    secret = secrets.token_hex(16)
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen(launch.size)
        store.set(_NOTE, f"{listener.getsockname()[1]} {secret}")
        while len(members) < launch.size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, launch.size)) - set(members))
                raise ParallelError(
                    f"ranks {missing} have not called within {START_TIMEOUT.total_seconds():g} s"
                ) from None
            lines = Lines(link)
            rank = _introduction(lines, secret)
            if rank is not None and 0 < rank < launch.size and rank not in members:
                lines.write({"welcome": rank})
                members[rank] = RemoteMember(rank, lines)
            else:
                link.close()
    return [members[rank] for rank in sorted(members)]


def _introduction(lines: Lines, secret: str) -> int | None:
    """The rank of who calls; None for a stranger."""
    lines.socket.settimeout(_INTRODUCTION_SECONDS)
    try:
        # One line, shorter than any segment; nothing follows before it is answered.
        [said] = lines.read() or []
        if hmac.compare_digest(said["secret"], secret):
            lines.socket.settimeout(None)
            _keep_alive(lines.socket)
            return int(said["rank"])
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("a stranger has called: %r", error)
    return None


def call_leader(launch: Torchrun, store: Store) -> Lines:
    """The others' side. Raises `OSError` if rank 0 cannot be reached or is gone."""
    port, secret = store.get(_NOTE).decode().split()
    link = socket.create_connection((launch.address, int(port)), START_TIMEOUT.total_seconds())
    link.settimeout(None)
    _keep_alive(link)
    lines = Lines(link)
    lines.write({"secret": secret, "rank": launch.rank})
    if not lines.read():
        raise ConnectionError(f"rank {launch.rank} is not welcome, or rank 0 has gone")
    return lines


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
