"""Processes of our own that end when their parent does, and what the two tell each other.

A socket pair joins them: lines of JSON go both ways, and its end is how each side notices the
other's, however that came about. On Linux the kernel also kills a child whose parent is gone, for
a child that is too busy to look.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Child", "Lines", "ParentLink", "exit_reason", "log_to_stderr"]

_PR_SET_PDEATHSIG = 1
_MAX_LINE = 64 * 2**20


class Lines:
    """Lines of JSON out of a socket."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self._buffer = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Whole lines, after waiting for bytes; None when the other side is gone."""
        try:
            received = self.socket.recv(2**16)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:
            return None
        self._buffer += received
        if len(self._buffer) > _MAX_LINE:
            raise ValueError(f"a line must have at most {_MAX_LINE} bytes, got more")
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def write(self, message: dict[str, Any]) -> bool:
        """Send a line; False if the other side is gone."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


class Child:
    """A Python module running as a process.

    Args:
        module: What `python -m` runs; it gets the number of its socket and our process id.
        on_exit: Called with the child's exit code, on a thread of the child's own.
    """

    def __init__(self, module: str, on_exit: Callable[[int], None]) -> None:
        ours, theirs = socket.socketpair()
        self.lines = Lines(ours)
        self.exited = threading.Event()
        self._module = module
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._failure: OSError | None = None
        # The kernel takes the end of the thread that started a child for the end of its parent.
        # This thread lives as long as the child.
        name = f"child {module.rpartition('.')[2]}"
        threading.Thread(target=self._run, args=(theirs,), name=name, daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            ours.close()
            raise self._failure

    def _run(self, theirs: socket.socket) -> None:
        number = theirs.fileno()
        command = [sys.executable, "-m", self._module, str(number), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=(number,), stdin=subprocess.DEVNULL
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        code = self._process.wait()
        self.exited.set()
        self._on_exit(code)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, "a child that did not start is never seen"
        return self._process.pid

    def tell(self, **message: Any) -> None:
        """Send it a line; one to a child that is gone is lost."""
        self.lines.write(message)

    def leave(self) -> None:
        """Let it see the end of us."""
        self.lines.socket.close()

    def kill(self) -> None:
        """End it now."""
        if self._process is not None and not self.exited.is_set():
            self._process.kill()

    def close(self, patience: float) -> None:
        """Let it end by itself for so many seconds, then end it."""
        self.leave()
        if not self.exited.wait(patience):
            self.kill()
            self.exited.wait()


class ParentLink:
    """The child's side of a `Child`, from the arguments that it was started with."""

    def __init__(self, arguments: list[str]) -> None:
        number, parent = (int(argument) for argument in arguments)
        self.lines = Lines(socket.socket(fileno=number))
        # The parent decides when we end: a Ctrl-C or a stop of the whole group is for it.
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def first(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the parent says first, and the lines that came with it.

        Ends the process if the parent is gone.
        """
        while (lines := self.lines.read()) is not None:
            if lines:
                return lines[0], lines[1:]
        os._exit(1)


def log_to_stderr(level: int) -> None:
    """Have a child log from a level on, beside its parent."""
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


def exit_reason(what: str, code: int) -> str:
    """How a process ended, from the exit code of `subprocess`."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"{what} was killed by {name}"
    return f"{what} has exited with code {code}"
