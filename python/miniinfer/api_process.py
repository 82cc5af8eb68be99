"""One of several server processes: `python -m miniinfer.api_process`, started by `processes`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from .child import ParentLink, log_to_stderr
from .config import EngineArgs
from .engine_link import EngineLink
from .remote_llm import Layout, RemoteLLM
from .server.config import ServerConfig
from .server.run import bind, serve

__all__ = ["main"]


class _ServerLLM(RemoteLLM):
    """Tells the parent, which starts the engines, when they can connect."""

    def __init__(self, parent: ParentLink, args: EngineArgs, layout: Layout) -> None:
        self._parent = parent
        super().__init__(args, layout=layout)

    def _announce(self) -> None:
        _tell(self._parent, bound=True)

    def _end_hung(self, link: EngineLink) -> None:
        _tell(self._parent, hung=link.engine, pid=link.pid)


def main(arguments: list[str]) -> int:
    """Serve until the parent says stop; an end without a word is an end of ours."""
    parent = ParentLink(arguments)
    first, others = parent.first()
    if others:
        # Told to stop before it has begun.
        return 0
    log_to_stderr(first["log_level"])
    args = EngineArgs(**first["args"])
    config = ServerConfig(**{name: _tupled(value) for name, value in first["config"].items()})
    layout = Layout(Path(first["folder"]), first["client"], first["engines"])

    def watch() -> asyncio.Event:
        stop = asyncio.Event()
        parent.lines.socket.setblocking(False)

        def on_line() -> None:
            lines = parent.lines.read()
            if lines is None:
                os._exit(1)
            if lines:
                stop.set()

        asyncio.get_running_loop().add_reader(parent.lines.socket, on_line)
        return stop

    try:
        return serve(
            lambda: _ServerLLM(parent, args, layout),
            config,
            listener=bind(config.host, config.port, shared=True),
            watch=watch,
            announce=lambda text: _tell(parent, ready=text),
        )
    except Exception as error:
        _tell(parent, error=" ".join(str(error).split()) or type(error).__name__)
        return 1


def _tell(parent: ParentLink, **message: object) -> None:
    parent.lines.write(message)


def _tupled(value: Any) -> Any:
    """A setting as `ServerConfig` has it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
