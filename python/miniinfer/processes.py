"""Several server processes over several engine processes, and the one that starts them all.

Each server process listens on the same port (SO_REUSEPORT: the kernel spreads the connections) and
is a client of every engine. This process serves nothing itself: it starts the others, tells engines
of clients, starts again what dies, and passes a stop on. If it is killed, all end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .child import Child, exit_reason
from .config import EngineArgs
from .remote_llm import ENGINE_MODULE, Layout
from .server.config import ServerConfig
from .server.run import ServerStartError, bind
from .socket_folder import SocketFolder
from .source import resolve_model

__all__ = ["Processes", "serve_processes"]

logger = logging.getLogger(__name__)

API_MODULE = "miniinfer.api_process"

_PAUSE_SECONDS = 1.0
"""Between the death of a process and the start of its successor."""

_PATIENCE_SECONDS = 2.0
"""How long a process may take to end once we have left it."""

_DRAIN_GRACE_SECONDS = 10.0
"""How much longer than their own time for it server processes may take to finish."""


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """How many of which.

    Args:
        api: Server processes.
        engines: Engine processes, each with the whole model.
        restart_engines: Start an engine again that died or hangs.
        devices: The GPUs of each engine, see `device_groups`; None leaves all to all.
    """

    api: int = 1
    engines: int = 1
    restart_engines: bool = False
    devices: list[str] | None = None
    engine_module: str = ENGINE_MODULE

    def __post_init__(self) -> None:
        most = 2**10
        for name, value in (("api_processes", self.api), ("engines", self.engines)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, got {value}")


def serve_processes(args: EngineArgs, config: ServerConfig, processes: Processes) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    Raises `ServerStartError` if the address is taken or a process does not start.
    """
    source = resolve_model(args.model, args.revision)
    name = args.served_model_name or source.name
    args = dataclasses.replace(args, model=str(source.path), revision=None, served_model_name=name)
    # Whoever else listens there, sharing or not, is found out by one who does not share.
    with bind(config.host, config.port) as probe:
        config = dataclasses.replace(config, port=probe.getsockname()[1])
    with contextlib.closing(_keep_port(config.host, config.port)):
        folder = SocketFolder()
        try:
            return asyncio.run(_Supervisor(args, config, processes, folder.path).run())
        finally:
            folder.remove()


def _keep_port(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen: it keeps the port, and gets no connections."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    keeper = socket.socket(family, kind)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    keeper.bind(address)
    return keeper


class _Supervisor:
    """Starts, watches and ends the processes; everything happens in its event loop."""

    def __init__(
        self, args: EngineArgs, config: ServerConfig, processes: Processes, folder: Path
    ) -> None:
        self._args = args
        self._config = config
        self._processes = processes
        self._folder = folder
        self._clients: dict[int, Child] = {}
        self._bound: set[int] = set()
        self._engines: dict[int, Child] = {}
        self._next_client = 0
        self._num_ready = 0
        self._stopping = False
        self._failure: str | None = None
        self._ended = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            # The engines first: they take longest.
            for engine in range(self._processes.engines):
                self._start_engine(engine)
            for _ in range(self._processes.api):
                self._start_client()
            await self._ended.wait()
        finally:
            await asyncio.to_thread(self._end_all)
        if self._failure is not None:
            raise ServerStartError(self._failure)
        return 0

    def _start(self, module: str, on_exit: Callable[[int], None]) -> Child:
        loop = asyncio.get_running_loop()

        def exited(code: int) -> None:
            # At the end of all there is no loop any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(on_exit, code)

        return Child(module, exited)

    def _start_engine(self, engine: int) -> None:
        if self._stopping or self._ended.is_set():
            return

        def exited(code: int) -> None:
            if self._ended.is_set():
                return
            child = self._engines.pop(engine)
            said = [line["error"] for line in child.lines.read() or ()]
            child.leave()
            if self._stopping:
                return
            reason = exit_reason(f"engine {engine}", code)
            logger.error("%s", reason)
            self._fail(*said, reason)
            if self._processes.restart_engines:
                asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._start_engine, engine)

        child = self._start(self._processes.engine_module, exited)
        self._engines[engine] = child
        devices = self._processes.devices
        child.tell(
            args=self._args.as_dict(),
            engine=engine,
            devices=None if devices is None else devices[engine],
            log_level=self._log_level(),
        )
        for client in self._bound:
            self._introduce(client, engine)

    def _start_client(self) -> None:
        """Start a server process. A number is given once: late words to a dead one reach nobody."""
        if self._stopping or self._ended.is_set():
            return
        number = self._next_client
        self._next_client += 1

        def exited(code: int) -> None:
            if self._ended.is_set():
                return
            child = self._clients.pop(number)
            asyncio.get_running_loop().remove_reader(child.lines.socket)
            on_line(child)
            child.leave()
            self._bound.discard(number)
            if self._stopping:
                if not self._clients:
                    self._ended.set()
                return
            reason = exit_reason(f"server process {number}", code)
            logger.error("%s", reason)
            self._fail(reason)
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._start_client)

        def on_line(child: Child) -> None:
            lines = child.lines.read()
            if lines is None:
                # Its end, which is about to be told, would be readable for ever.
                asyncio.get_running_loop().remove_reader(child.lines.socket)
            for line in lines or ():
                if "bound" in line:
                    self._bound.add(number)
                    for engine in self._engines:
                        self._introduce(number, engine)
                elif "error" in line:
                    self._fail(line["error"])
                elif "ready" in line:
                    self._on_ready(line["ready"])
                elif "hung" in line:
                    self._end_hung(line["hung"], line["pid"])

        child = self._start(API_MODULE, exited)
        self._clients[number] = child
        child.tell(
            args=self._args.as_dict(),
            config=_plain(self._config),
            folder=str(self._folder),
            client=number,
            engines=self._processes.engines,
            log_level=self._log_level(),
        )
        child.lines.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(child.lines.socket, on_line, child)

    def _end_hung(self, engine: int, pid: int) -> None:
        """End an engine that gives no sign of life; its successor, which others know, is spared."""
        child = self._engines.get(engine)
        if child is not None and child.pid == pid:
            logger.error("engine %d gives no sign of life and is ended", engine)
            child.kill()

    def _introduce(self, client: int, engine: int) -> None:
        layout = Layout(self._folder, client, self._processes.engines)
        self._engines[engine].tell(client=layout.number(engine), folder=str(self._folder))

    def _on_ready(self, banner: str) -> None:
        self._num_ready += 1
        if self._num_ready == self._processes.api:
            print(banner, flush=True)

    def _fail(self, *reasons: str) -> None:
        """Give up, for the first of these reasons, if nothing has been ready yet."""
        if self._num_ready == 0 and not self._ended.is_set():
            self._failure = reasons[0]
            self._ended.set()

    def _on_signal(self, number: int) -> None:
        if self._stopping:
            # Those that are left end with us.
            os._exit(128 + number)
        self._stopping = True
        for child in self._clients.values():
            child.tell(stop=True)
        if not self._clients:
            self._ended.set()
        patience = self._config.shutdown_timeout + _DRAIN_GRACE_SECONDS
        asyncio.get_running_loop().call_later(patience, self._ended.set)

    def _end_all(self) -> None:
        for child in [*self._clients.values(), *self._engines.values()]:
            child.leave()
        for child in [*self._clients.values(), *self._engines.values()]:
            child.close(_PATIENCE_SECONDS)

    @staticmethod
    def _log_level() -> int:
        return logging.getLogger().getEffectiveLevel()


def _plain(config: ServerConfig) -> dict[str, Any]:
    """Settings as JSON has them."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()
    }
