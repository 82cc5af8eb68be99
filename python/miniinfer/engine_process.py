"""An engine in a process of its own: `python -m miniinfer.engine_process`, started by its parent.

The main thread loads the model and steps. A second one listens: to the clients, whose messages go
straight into the core's inbox, and to the parent, whose end is ours. What a step says is sent by
the main thread, one frame a client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from . import __version__
from ._core import EngineHost
from .child import ParentLink, log_to_stderr
from .parallel.device_groups import VISIBLE
from .watchdog import Watchdog, taken_for_hung
from .wire import (
    DEAD,
    LAST_WORDS_MS,
    PROTOCOL,
    READY,
    REPLY,
    UTILITY,
    Hello,
    Reply,
    Utility,
    engine_identity,
    lost_peer,
    open_socket,
    paths,
    watch_peer,
)

if TYPE_CHECKING:
    from ._core import _Limits

__all__ = ["Steps", "run"]

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_SECONDS = 0.0005
"""How long the step loop may keep the GIL when a message wants in."""


class Steps(Protocol):
    """An engine that can be stepped, as `miniinfer.engine.StepEngine` can."""

    core: EngineHost
    limits: _Limits

    def step(self) -> bool:
        """Compute a step; False if there was nothing to compute."""

    def hello(self) -> Hello:
        """What clients must know."""


def load(args: dict[str, Any]) -> Steps:
    """Load the model that the settings of an `EngineArgs` name."""
    from .config import EngineArgs
    from .engine import StepEngine

    class HostedEngine(StepEngine):
        """A model under a core whose clients are elsewhere."""

        core: EngineHost

        def _new_core(self, limits: _Limits) -> EngineHost:
            return EngineHost(self.tokenizer.json(), limits, list(self.eos_token_ids))

        def hello(self) -> Hello:
            return Hello(
                PROTOCOL,
                __version__,
                self.model_name,
                list(self.eos_token_ids),
                self.default_sampling_params(),
                dict(self.limits),
            )

    return HostedEngine(EngineArgs(**args))


@dataclasses.dataclass(slots=True)
class _Client:
    """Sockets of one client."""

    number: int
    messages: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    frames: zmq.Socket[bytes]

    def send(self, *frames: bytes) -> None:
        # As parts of one message, frames arrive together and wake their reader once. A socket whose
        # peer is gone would wait for another.
        with contextlib.suppress(zmq.Again):
            self.frames.send_multipart(frames, zmq.NOBLOCK)

    def send_last_words(self, reason: str) -> None:
        self.frames.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        self.send(bytes([DEAD]) + reason.encode())
        self.frames.close()

    def close(self) -> None:
        self.messages.disable_monitor()
        self.monitor.close()
        self.messages.close()
        self.frames.close()


class Exchange:
    """The engine's sockets.

    Messages are received on the thread of `listen` alone; frames may be sent from any.
    """

    def __init__(self, parent: ParentLink, number: int) -> None:
        self._parent = parent
        self._number = number
        self._inward: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Apart, so that it can be ended, with what is still to be sent, while the other is in use.
        self._outward: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._clients: dict[int, _Client] = {}
        self._host: EngineHost | None = None
        self._hello = b""

    def open(self, host: EngineHost, hello: Hello) -> None:
        """The model is loaded: tell the clients, and let their messages in."""
        with self._lock:
            self._host, self._hello = host, msgspec.msgpack.encode(hello)
            for client in self._clients.values():
                self._introduce(client)

    def send(self, client: int, *frames: bytes) -> None:
        """Send frames; those to a client that is gone are lost."""
        with self._lock:
            if client in self._clients:
                self._clients[client].send(*frames)

    def send_step(self, frames: list[tuple[int, bytes]]) -> None:
        """Send each client what a step has for it."""
        by_client: dict[int, list[bytes]] = {}
        for client, frame in frames:
            by_client.setdefault(client, []).append(frame)
        for client, its in by_client.items():
            self.send(client, *its)

    def die(self, reason: str) -> None:
        """Tell all clients that nothing more will come."""
        with self._lock:
            for client in self._clients.values():
                client.send_last_words(reason)
            self._clients.clear()
        self._outward.term()

    def listen(self, lines: list[dict[str, Any]]) -> None:
        """Obey the parent's lines, then those that come, and take in the clients' messages.

        The end of the parent ends the process.
        """
        try:
            self._listen(lines)
        except BaseException:
            # An engine that hears nothing is of no use to anybody.
            logger.critical("the engine does not hear any more", exc_info=True)
            os._exit(1)

    def _listen(self, lines: list[dict[str, Any]]) -> None:
        self._obey(lines)
        while True:
            poller = zmq.Poller()
            poller.register(self._parent.lines.socket, zmq.POLLIN)
            for client in self._clients.values():
                poller.register(client.messages, zmq.POLLIN)
                poller.register(client.monitor, zmq.POLLIN)
            known = list(self._clients.values())
            while known == list(self._clients.values()):
                ready = dict(poller.poll())
                if self._parent.lines.socket.fileno() in ready:
                    self._obey(self._parent.lines.read())
                for client in known:
                    if client.messages in ready:
                        self._receive(client)
                    elif client.monitor in ready and lost_peer(client.monitor):
                        self._drop(client)

    def _obey(self, lines: list[dict[str, Any]] | None) -> None:
        if lines is None:
            # Nobody is there to hear anything.
            os._exit(0)
        for line in lines:
            self._connect(line["client"], Path(line["folder"]))

    def _connect(self, number: int, folder: Path) -> None:
        inward, outward = paths(folder, number, self._number)
        messages = open_socket(self._inward, zmq.DEALER)
        frames = open_socket(self._outward, zmq.PUSH)
        messages.setsockopt(zmq.IDENTITY, engine_identity())
        for socket in (messages, frames):
            # A client that is gone does not come back under its number.
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        client = _Client(number, messages, watch_peer(messages), frames)
        messages.connect(inward)
        frames.connect(outward)
        messages.send(b"")
        with self._lock:
            self._clients[number] = client
            if self._host is not None:
                self._introduce(client)

    def _introduce(self, client: _Client) -> None:
        assert self._host is not None, "the model is loaded"
        self._host.connect(client.number)
        client.send(bytes([READY]) + self._hello)

    def _drop(self, client: _Client, last_words: str | None = None) -> None:
        with self._lock:
            if self._clients.pop(client.number, None) is None:
                # The engine has died, and told it so.
                return
            if self._host is not None:
                self._host.disconnect(client.number)
            if last_words is not None:
                client.send_last_words(last_words)
            client.close()

    def _receive(self, client: _Client) -> None:
        """All messages of a client that are there."""
        while True:
            try:
                frames = client.messages.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take_in(client.number, frames)
            except ValueError as error:
                logger.error("client %d is not understood: %s", client.number, error)
                self._drop(client, f"it did not understand: {error}")
                return

    def _take_in(self, number: int, frames: list[bytes]) -> None:
        if self._host is None or len(frames) != 2 or len(frames[0]) != 1:
            raise ValueError(
                "a message must be a type and what it says, to an engine that is there"
            )
        kind, message = frames[0][0], frames[1]
        if kind != UTILITY:
            self._host.feed(number, kind, message)
            return
        asked = msgspec.msgpack.decode(message, type=Utility)
        reply = Reply(asked.call, self._answer(self._host, asked.name))
        self.send(number, bytes([REPLY]) + msgspec.msgpack.encode(reply))

    @staticmethod
    def _answer(host: EngineHost, name: str) -> str | None:
        if name == "ping":
            return None
        if name == "check":
            try:
                host.check()
            except RuntimeError as error:
                return str(error)
            return None
        raise ValueError(f"a question must be ping or check, got {name!r}")


def run(arguments: list[str], load: Callable[[dict[str, Any]], Steps]) -> int:
    """Be an engine until the parent is gone; return the exit code of one that has died.

    `load` makes the engine of the settings that the parent sends.
    """
    parent = ParentLink(arguments)
    first, others = parent.first()
    log_to_stderr(first["log_level"])
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    if first.get("devices") is not None:
        # Before torch looks at them. The processes of this engine inherit it.
        os.environ[VISIBLE] = first["devices"]
        logger.info("engine %d has the GPUs %s", first["engine"], first["devices"])
    exchange = Exchange(parent, first["engine"])
    threading.Thread(target=exchange.listen, args=(others,), name="listen", daemon=True).start()
    try:
        engine = load(first["args"])
    except BaseException as error:
        logger.debug("the model cannot be loaded", exc_info=error)
        reason = " ".join(str(error).split()) or type(error).__name__
        # There may be no clients yet.
        parent.lines.write({"error": reason})
        exchange.die(reason)
        return 1
    exchange.open(engine.core, engine.hello())
    reason = _step(engine, exchange, _watched(exchange, first["args"]))
    exchange.die(reason)
    return 1


def _watched(exchange: Exchange, args: dict[str, Any]) -> Watchdog | None:
    """What ends the process when a step hangs, if the settings say how long one may take."""
    limit = args.get("step_timeout")
    if limit is None:
        return None

    def give_up() -> None:
        reason = taken_for_hung(limit)
        logger.critical("the engine has stopped: %s", reason)
        exchange.die(reason)
        logging.shutdown()
        os._exit(1)

    return Watchdog(limit, give_up)


def _step(engine: Steps, exchange: Exchange, watchdog: Watchdog | None) -> str:
    """Step while there is work, sleep while there is none; why it had to stop."""
    core = engine.core
    try:
        while True:
            if watchdog is not None:
                watchdog.begin()
            worked = engine.step()
            exchange.send_step(core.take_frames(not worked))
            if not worked:
                if watchdog is not None:
                    watchdog.rest()
                core.wait()
    except BaseException as error:
        logger.critical("the engine has stopped", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    core.fail(reason)
    exchange.send_step(core.take_frames(True))
    return reason


if __name__ == "__main__":
    code = run(sys.argv[1:], load)
    logging.shutdown()
    # The listening thread still waits; what an interpreter does at its end is not for it.
    os._exit(code)
