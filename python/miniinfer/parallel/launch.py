"""Where the processes of an engine leave each other notes until they are connected."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

__all__ = ["LOOPBACK", "START_TIMEOUT", "join_store", "launched_store", "serve_store"]

LOOPBACK = "127.0.0.1"

START_TIMEOUT = timedelta(seconds=300)
"""How long the processes may take to find each other; importing torch takes most of it."""


def launched_store() -> Store:
    """That of torchrun, or at the address that the environment names; waits for rank 0."""
    store, _, _ = next(iter(rendezvous("env://", timeout=START_TIMEOUT)))
    return PrefixStore("miniinfer", store)


def serve_store(size: int) -> tuple[Store, int]:
    """Where processes of this machine leave each other notes, and its port; for rank 0."""
    with socket.socket() as listener:
        # Bound here, as the store by itself would listen to the whole network.
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            size,
            is_master=True,
            timeout=START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def join_store(port: int, size: int) -> Store:
    """The same for the others."""
    return TCPStore(LOOPBACK, port, size, is_master=False, timeout=START_TIMEOUT)
