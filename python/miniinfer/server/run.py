"""Run the server: bind, load, announce, serve, drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from aiohttp import web

from miniinfer.safe_logging import safe_logger

from .app import make_app
from .banner import banner
from .config import ServerConfig
from .engine_api import Engine
from .runner import Runner, Site
from .state import STATE, ServerState
from .tls import TLSError, server_context
from .tracing import Tracing, TracingError

logger = safe_logger("miniinfer.server")

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long a thread may keep the GIL when another wants it; the default is ten times that."""
_BACKLOG = 1024
_MOST_HANDSHAKE_SECONDS = 10.0
"""How long a TLS handshake may take, if the idle timeout leaves it so long."""
_ABORT_GRACE_SECONDS = 2.0

EXIT_ENGINE_DIED = 3
"""The exit code of a server that was stopped after its engine had died."""


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
    app = make_app(engine, config, _tracing(config))
    stop = watch()
    runner = await listen(app, listener)
    try:
        # Only now: while torch is imported its thread and this one share the GIL.
        _load_in_thread(load_engine, loading)
        stopping = asyncio.ensure_future(stop.wait())
        either: set[asyncio.Future[Any]] = {engine, stopping}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            # A load cannot be interrupted, and its thread must not outlive the interpreter.
            logger.info("stopped while loading")
            _leave(0)
        if not stop.is_set():
            announce(banner(engine.result(), config, listener.getsockname()))
            await stopping
        await drain(app[STATE], config.shutdown_timeout)
        died = not engine.result().is_healthy if engine.done() else False
    finally:
        await runner.cleanup()
    if died:
        # A step that hangs keeps its thread, which must not outlive the interpreter.
        _leave(EXIT_ENGINE_DIED)
    return 0


async def listen(app: web.Application, listener: socket.socket) -> Runner:
    """Serve an application on a listening socket; raises `ServerStartError` for bad TLS files.

    `cleanup` of what is returned ends it.
    """
    config = app[STATE].config
    tls = _tls(config)
    runner = Runner(app, shutdown_timeout=_ABORT_GRACE_SECONDS)
    await runner.setup()
    handshake_seconds = min(config.idle_timeout, _MOST_HANDSHAKE_SECONDS)
    await Site(runner, listener, tls, handshake_seconds, backlog=_BACKLOG).start()
    return runner


def check(config: ServerConfig) -> None:
    """Try all that a start needs but the model; raises `ServerStartError` for what is wrong."""
    _tls(config)
    tracing = _tracing(config)
    if tracing is not None:
        tracing.close()
    bind(config.host, config.port).close()


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    try:
        return None if config.tls_cert is None else server_context(config.tls_cert, config.tls_key)
    except TLSError as error:
        raise ServerStartError(str(error)) from error


def _tracing(config: ServerConfig) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        return Tracing.to_endpoint(config.otlp_traces_endpoint)
    except TracingError as error:
        raise ServerStartError(str(error)) from error


def _leave(code: int) -> NoReturn:
    """End the process at once, whatever its threads are doing."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


async def drain(state: ServerState, timeout: float) -> None:
    """Refuse new work and let requests in flight finish, then end those that have not."""
    state.draining = True
    if state.num_active:
        logger.info("finishing %s, at most %g s", _requests(state.num_active), timeout)
    if await state.wait_idle(timeout):
        return
    logger.warning("ending %s that did not finish in time", _requests(state.num_active))
    state.abort_all()
    await state.wait_idle(_ABORT_GRACE_SECONDS)


def _requests(count: int) -> str:
    """Return so many requests in words."""
    return f"{count} request" if count == 1 else f"{count} requests"


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
