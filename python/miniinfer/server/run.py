"""Run the server: bind, load, announce, serve, drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from .app import make_app
from .banner import banner
from .config import ServerConfig
from .engine_api import Engine
from .runner import Runner
from .state import STATE, ServerState

logger = logging.getLogger("miniinfer.server")

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long a thread may keep the GIL when another wants it; the default is ten times that."""
_BACKLOG = 1024
_ABORT_GRACE_SECONDS = 2.0


class ServerStartError(RuntimeError):
    """The server cannot start; the message is one line for the user."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket; raises `ServerStartError` if the address is taken or wrong.

    `shared`: other processes listen on the same port, and each gets a share of the connections.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG, reuse_port=shared)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ServerStartError(f"cannot listen on {host}:{port}: {reason}") from error


def serve(
    load_engine: Callable[[], Engine],
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    watch: Callable[[], asyncio.Event] | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    A process among others brings the socket to listen on, what sets the event that ends it, and
    what takes the place of printing that it is ready.

    The port is bound and /health answers before `load_engine` is called, in a thread of its own:
    a port in use costs no load, and a probe is never met by silence. Raises `ServerStartError`, and
    whatever `load_engine` raises.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    listener = listener or bind(config.host, config.port)
    serving = _serve(listener, load_engine, config, watch or watch_signals, announce or _print)
    with contextlib.closing(listener):
        return asyncio.run(serving)


async def _serve(
    listener: socket.socket,
    load_engine: Callable[[], Engine],
    config: ServerConfig,
    watch: Callable[[], asyncio.Event],
    announce: Callable[[str], None],
) -> int:
    loading: concurrent.futures.Future[Engine] = concurrent.futures.Future()
    engine = asyncio.wrap_future(loading)
    app = make_app(engine, config)
    stop = watch()
    runner = Runner(
        app,
        access_log_class=AccessLogger,
        access_log=logging.getLogger("miniinfer.access") if config.access_log else None,
        shutdown_timeout=_ABORT_GRACE_SECONDS,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        # Only now: while torch is imported its thread and this one share the GIL.
        _load_in_thread(load_engine, loading)
        stopping = asyncio.ensure_future(stop.wait())
        either: set[asyncio.Future[Any]] = {engine, stopping}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            # A load cannot be interrupted, and its thread must not outlive the interpreter.
            logger.info("stopped while loading")
            logging.shutdown()
            os._exit(0)
        if not stop.is_set():
            announce(banner(engine.result(), config, listener.getsockname()))
            await stopping
        await drain(app[STATE], config.shutdown_timeout)
    finally:
        await runner.cleanup()
    return 0


async def drain(state: ServerState, timeout: float) -> None:
    """Refuse new work and let requests in flight finish, then end those that have not."""
    state.draining = True
    if state.num_active:
        logger.info("finishing %d requests, at most %g s", state.num_active, timeout)
    if await state.wait_idle(timeout):
        return
    logger.warning("ending %d requests that did not finish in time", state.num_active)
    state.abort_all()
    await state.wait_idle(_ABORT_GRACE_SECONDS)


def _load_in_thread(
    load_engine: Callable[[], Engine], outcome: concurrent.futures.Future[Engine]
) -> None:
    """Call `load_engine` in a daemon thread; an executor's thread would hold up an exit."""

    def load() -> None:
        try:
            outcome.set_result(load_engine())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=load, name="load-model", daemon=True).start()


def _print(text: str) -> None:
    print(text, flush=True)


def watch_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


class AccessLogger(AbstractAccessLogger):
    """One line per request, without the probes that pass."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log the client, the request line, the status and the duration in seconds."""
        if request.path in ("/health", "/ping", "/metrics") and response.status == 200:
            return
        self.logger.info(
            "%s %s %r %d %.3fs", request.remote, request.method, request.path, response.status, time
        )
