"""One engine as a process without torch holds it: sockets, and the text of what they bring."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from . import __version__
from ._core import Delta, RemoteFrontend
from .errors import EngineDeadError
from .wire import (
    DEAD,
    PROTOCOL,
    READY,
    REPLY,
    UTILITY,
    Hello,
    Reply,
    Utility,
    engine_pid,
    lost_peer,
    open_socket,
    paths,
    watch_peer,
)

__all__ = ["EngineLink"]

logger = logging.getLogger(__name__)

_FRAMES_AT_ONCE = 64
"""Frames taken in before others get their turn; what waits meanwhile is merged."""


class EngineLink:
    """A connection to one engine, which may be followed by another in its place.

    Its methods are for one thread at a time, but for `lose`. `number` is the client's, `engine`
    the engine's. `owned`: the engine's process is ours, and `lose` is told how it ended; otherwise
    the end of the connection says that it has. `max_backlog` and `stall_limit` are those of
    `EngineArgs`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        number: int,
        engine: int,
        load_tokenizer: Callable[[], bytes],
        *,
        owned: bool,
        max_backlog: int,
        stall_limit: float,
    ) -> None:
        self.hello: Hello | None = None
        self.frontend: RemoteFrontend | None = None
        self.error: str | None = "the engine is still loading"
        self.heard_at = 0.0
        self.outstanding = 0
        """Tokens that live requests may still take."""
        self.engine = engine
        self._number = number
        self._owned = owned
        self._patience = max_backlog, stall_limit
        self._load_tokenizer = load_tokenizer
        self._identity: bytes | None = None
        self._introduced: Hello | None = None
        self._next_call = 0
        self._calls: dict[int, Callable[[str | None], None]] = {}
        inward, outward = paths(folder, number, engine)
        self._messages = open_socket(context, zmq.ROUTER)
        self._messages.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._frames = open_socket(context, zmq.PULL)
        self._monitor = watch_peer(self._frames)
        self._messages.bind(inward)
        self._frames.bind(outward)
        self._over = False
        """The engine that introduced itself last is known to be gone, and `error` says why."""
        self._lost: str | None = None
        self._lose_lock = threading.Lock()
        self._poke_out, self._poke_in = os.pipe()
        os.set_blocking(self._poke_out, False)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be submitted."""
        return self.error is None

    @property
    def pid(self) -> int | None:
        """Process id of the engine that is there."""
        return None if self._identity is None else engine_pid(self._identity)

    def frames_fd(self) -> int:
        """Readable when there are frames: call `take_frames`, until it returns False."""
        return int(self._frames.getsockopt(zmq.FD))

    def other_fds(self) -> list[int]:
        """Readable when there is something else: call `look`, `drain` and `send`."""
        found = [int(socket.getsockopt(zmq.FD)) for socket in (self._messages, self._monitor)]
        if self.frontend is not None:
            found.append(self.frontend.wake_fd())
        return [*found, self._poke_out]

    def wait(self) -> None:
        """Wait until something happens; for a thread without an event loop."""
        poller = zmq.Poller()
        for socket in (self._messages, self._frames, self._monitor):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._poke_out, zmq.POLLIN)
        poller.poll()

    def lose(self, reason: str) -> None:
        """The engine is gone, says somebody who knows why. From any thread."""
        with self._lose_lock:
            self._lost = reason
            if self._poke_in >= 0:
                os.write(self._poke_in, b"!")

    def look(self) -> None:
        """Notice an engine that has come or gone."""
        # Looked at before the frames are: what the engine sent before its end counts.
        lost = self._lost_reason()
        with contextlib.suppress(zmq.Again):
            while True:
                self._identity = self._messages.recv_multipart(zmq.NOBLOCK)[0]
                self._over = False
        while self.take_frames() and lost:
            pass
        if self._introduced is not None and self._identity is not None:
            self._welcome(self._introduced)
        # What the engine itself said of its end goes before what was seen of it.
        if lost and not self._over:
            self._die(lost)

    def _lost_reason(self) -> str | None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._poke_out, 64)
        with self._lose_lock:
            reason, self._lost = self._lost, None
        if lost_peer(self._monitor) and not self._owned and self.error is None:
            reason = reason or "its process is gone"
        return reason

    def take_frames(self) -> bool:
        """Take in frames that have come. True if there may be more at once."""
        for _ in range(_FRAMES_AT_ONCE):
            # Looked up, as an exception for the usual end costs more than a frame.
            if not int(self._frames.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            self._take_in(self._frames.recv(zmq.NOBLOCK))
        return True

    def _take_in(self, frame: bytes) -> None:
        self.heard_at = time.monotonic()
        kind = frame[0] if frame else -1
        try:
            if kind == READY:
                self._introduced = msgspec.msgpack.decode(frame[1:], type=Hello)
            elif kind == DEAD:
                self._die(frame[1:].decode(errors="replace"))
            elif kind == REPLY:
                reply = msgspec.msgpack.decode(frame[1:], type=Reply)
                answered = self._calls.pop(reply.call, None)
                if answered is not None:
                    answered(reply.error)
            elif self.frontend is not None:
                self.frontend.feed(frame)
        except ValueError as error:
            self._die(f"it is not understood: {error}")

    def _welcome(self, hello: Hello) -> None:
        """An engine is there: the first, or one in the place of one that was lost."""
        self._introduced = None
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            self._die(
                f"it speaks version {hello.version} (protocol {hello.protocol}), and this is "
                f"version {__version__} (protocol {PROTOCOL})"
            )
        elif self.frontend is None:
            max_backlog, stall_limit = self._patience
            self.frontend = RemoteFrontend(
                tokenizer_json=self._load_tokenizer(),
                limits=hello.limits,  # type: ignore[arg-type]
                eos_token_ids=hello.eos_token_ids,
                client=self._number,
                max_backlog=max_backlog,
                stall_limit=stall_limit,
            )
            self.hello, self.error = hello, None
        elif self.hello is not None and hello.limits != self.hello.limits:
            self._die(f"it has other limits ({hello.limits}) than before ({self.hello.limits})")
        else:
            self.frontend.reopen()
            self.error = None

    def _die(self, reason: str) -> None:
        """The engine is lost: every stream ends, requests are refused."""
        self._identity = self._introduced = None
        self._over = True
        self.error = reason
        for call in self._calls.values():
            call(reason)
        self._calls.clear()
        if self.frontend is not None:
            self.frontend.fail(reason)

    def fail(self, reason: str) -> None:
        """End every stream with an error, for a reason of ours."""
        self._die(reason)

    def drain(self) -> list[tuple[int, Delta]]:
        """All deltas that are ready, the wake-up that announced them taken back."""
        if self.frontend is None:
            return []
        self.frontend.clear_wake()
        return self.frontend.drain()

    def make_text(self) -> float | None:
        """Make text of what was taken in; seconds until that is needed again whatever comes."""
        return None if self.frontend is None else self.frontend.turn()

    def send(self) -> None:
        """Send the engine what there is for it."""
        if self.frontend is None:
            return
        for kind, message in self.frontend.take_messages():
            # What was meant for an engine that was lost is not for the one in its place.
            if self.is_ready:
                self._send(kind, message)

    def _send(self, kind: int, message: bytes) -> None:
        assert self._identity is not None, "there is an engine"
        try:
            self._messages.send_multipart([self._identity, bytes([kind]), message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Its end is on the way to us.
            logger.debug("a message is lost: %s", error)

    def ask(self, name: str, answered: Callable[[str | None], None]) -> None:
        """Ask the engine's process a question, see `wire.Utility`.

        `answered` is called with an error or None, by `look`. Raises `EngineDeadError`.
        """
        if self._identity is None:
            raise EngineDeadError(f"the engine has stopped: {self.error}")
        self._next_call += 1
        self._calls[self._next_call] = answered
        self._send(UTILITY, msgspec.msgpack.encode(Utility(self._next_call, name)))

    def close(self) -> None:
        """Close the sockets. The frontend lives on for those who still read."""
        self._frames.disable_monitor()
        for socket in (self._monitor, self._messages, self._frames):
            socket.close()
        with self._lose_lock:
            os.close(self._poke_in)
            os.close(self._poke_out)
            self._poke_in = -1
