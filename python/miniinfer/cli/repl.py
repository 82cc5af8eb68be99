"""The conversation loop of `miniinfer chat`."""

from __future__ import annotations

import os
import sys
from typing import Any

from .backend import Backend

HELP = """\
/help           show this
/reset          forget the conversation
/system TEXT    set the system message and start again; without TEXT, remove it
/quit           leave (so does Ctrl-D, or Ctrl-C at the prompt)
Ctrl-C          stop the current answer"""


class Repl:
    """Reads messages, prints answers as they come, and keeps the conversation."""

    def __init__(
        self,
        backend: Backend,
        options: dict[str, Any],
        *,
        system: str | None = None,
        interactive: bool = True,
    ) -> None:
        self._backend = backend
        self._options = options
        self._system = system
        self._interactive = interactive
        self._messages: list[dict[str, Any]] = []
        colour = interactive and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._prompt = "\x1b[1m>\x1b[0m " if colour else "> "

    def run(self) -> int:
        """Talk until the input ends; returns the exit code."""
        if self._interactive:
            print("Type a message, /help for commands, Ctrl-D to leave.")
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif not self._turn(line) and not self._interactive:
                return 1
        return 0

    def _read(self) -> str | None:
        """Return the next line, or None at the end or on Ctrl-C."""
        try:
            if self._interactive:
                return input(self._prompt)
            line = sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        return line.rstrip("\r\n") if line else None

    def _command(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, argument = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self._messages = []
        elif name == "/system":
            self._system = argument.strip() or None
            self._messages = []
        else:
            print(f"no command {name}; /help shows them", file=sys.stderr)
        return True

    def _turn(self, text: str) -> bool:
        """Answer one message; False if that failed, and the message is then forgotten."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*self._messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            self._print_answer([*system, *messages], pieces)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{os.linesep if pieces else ''}error: {error}", file=sys.stderr)
            return False
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return True

    def _print_answer(self, messages: list[dict[str, Any]], pieces: list[str]) -> None:
        """Print the answer and collect it in `pieces`; Ctrl-C keeps what came until then."""
        answer = self._backend.chat(messages, self._options)
        try:
            for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print("\n[stopped]")
        finally:
            answer.close()
