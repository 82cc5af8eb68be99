"""Servers to measure: how each is started at its best, held still while others run, and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miniinfer.fetch import ensure_builtin

from . import places

READY_SECONDS = 600.0
SLOTS = 32
"""Requests at once that llama.cpp's server is set up for."""
CONTEXT = 256
"""Tokens that a request of the load may have: 128 in and 64 out, and some room."""


class ServerFailed(RuntimeError):
    """A server did not come up; the message is one line."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """One server in a session of its own, so that all its processes can be held and ended."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_seconds: float = 0.0
    """From its start until /health said 200."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return places.home() / f"{self.name}.log"

    def start(self) -> None:
        """Start it and wait until it is ready; raises `ServerFailed`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self.command,
                # Where Python starts it looks for modules, and would find ours before a peer's.
                cwd=self.log.parent,
                env=os.environ | dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not self._is_ready():
                if self._process.poll() is not None:
                    raise ServerFailed(f"{self.name} ended while it started: see {self.log}")
                if time.perf_counter() - began > READY_SECONDS:
                    raise ServerFailed(f"{self.name} took more than {READY_SECONDS:.0f} s to start")
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = time.perf_counter() - began

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def processes(self) -> list[int]:
        """Every process of its session."""
        return [pid for pid, session in _sessions() if session == self._process.pid]

    def pause(self) -> None:
        """Hold all its processes: one that spins while it waits would take from the others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def resident_mb(self) -> float:
        """Resident memory of all its processes, what they share counted once for each."""
        pages = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _sessions() -> Iterator[tuple[int, int]]:
    """Process and session of all there are."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), int(fields[3])


def ours(name: str, *flags: str) -> Server:
    """This project's server with its defaults, but for `flags`."""
    port = free_port()
    program = shutil.which("miniinfer", path=str(Path(sys.executable).parent))
    command = [program] if program else [sys.executable, "-m", "miniinfer.cli"]
    command += ["serve", *flags, "--port", str(port), "--no-access-log", "--stats-interval", "0"]
    return Server(name, command, port)


def ours_plain(dtype: str) -> Server:
    """This project's server on the unquantised model."""
    return ours(f"plain-{dtype}", str(places.plain_model()), "--dtype", dtype)


def vllm() -> Server:
    """vLLM's server in bfloat16: two OpenMP threads, its allocator and OpenMP preloaded."""
    port, cores = free_port(), os.cpu_count() or 1
    libraries, _ = places.preloads()
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "OMP_NUM_THREADS": str(cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        # Its compiler is found there.
        "PATH": f"{places.vllm_python().parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [
        *(str(places.vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(places.plain_model()), "--dtype", "bfloat16", "--max-model-len", "2048"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    return Server("vllm", command, port, environment)


def llama() -> Server:
    """llama.cpp's server on the quantised file, a slot for each client."""
    port = free_port()
    command = [
        *(str(places.llama_binary("llama-server")), "--model", str(ensure_builtin())),
        *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT)),
        *("--threads", str(os.cpu_count()), "--host", "127.0.0.1", "--port", str(port)),
    ]
    return Server("llama", command, port)
