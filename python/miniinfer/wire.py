"""What both ends of the wire between an engine and its clients agree on.

A client binds a ROUTER and a PULL socket for each engine; the engine connects a DEALER and a PUSH.
The DEALER's first message is empty and makes its identity known. After that, messages to the engine
are two frames: a type, and what it says. Frames from the engine begin with a byte for their kind.
The types and kinds below `UTILITY` and `READY` are the core's, see `rust/core/src/wire`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import zmq

__all__ = [
    "DEAD",
    "PROTOCOL",
    "READY",
    "REPLY",
    "UTILITY",
    "Hello",
    "Reply",
    "Utility",
    "engine_identity",
    "engine_pid",
    "lost_peer",
    "open_socket",
    "paths",
    "watch_peer",
]

PROTOCOL = 1
"""Goes up when what crosses the wire changes."""

LAST_WORDS_MS = 4000
"""How long an engine that has died waits for its clients to hear of it."""

UTILITY = 6
"""Type of a message that wants an answer: a `Utility`."""

READY, DEAD, REPLY = 16, 17, 18
"""Kinds of frames: a `Hello`, a reason as text, a `Reply`."""


class Hello(msgspec.Struct, array_like=True):
    """An engine introduces itself."""

    protocol: int
    version: str
    model_name: str
    eos_token_ids: list[int]
    default_sampling_params: dict[str, Any]
    limits: dict[str, Any]


class Utility(msgspec.Struct, array_like=True):
    """A question: ping, or check (of the engine's whole state)."""

    call: int
    name: str


class Reply(msgspec.Struct, array_like=True):
    """The answer; an error or None."""

    call: int
    error: str | None


def paths(folder: Path, client: int, engine: int) -> tuple[str, str]:
    """Addresses of the sockets between a client and an engine: to the engine, and from it."""
    name = folder / f"{client}-{engine}"
    return f"ipc://{name}.in", f"ipc://{name}.out"


def engine_identity() -> bytes:
    """What an engine's DEALER is called, in the engine's process."""
    return b"engine-%d" % os.getpid()


def engine_pid(identity: bytes) -> int:
    """Process id of the engine with this identity."""
    return int(identity.removeprefix(b"engine-"))


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that queues without limit and says nothing more once it is closed.

    Its queues are bounded by the requests that are alive: nothing is sent for others.
    """
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    return socket


def watch_peer(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that is readable once the peer of this one is gone."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)


def lost_peer(monitor: zmq.Socket[bytes]) -> bool:
    """Whether the peer is gone; clears what the monitor has to say."""
    lost = False
    with contextlib.suppress(zmq.Again):
        while True:
            monitor.recv_multipart(zmq.NOBLOCK)
            lost = True
    return lost
