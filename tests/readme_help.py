"""The command line's help as README.md shows it. `python tests/readme_help.py` writes it there."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"

SHOWN = re.compile(r"^```text\n\$ miniinfer (?P<arguments>.*)\n(?P<output>(?:.*\n)*?)```$", re.M)


def help_text(arguments: list[str]) -> str:
    """What the command prints, 80 columns wide and without colour."""
    result = subprocess.run(
        [sys.executable, "-m", "miniinfer.cli", *arguments],
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def shown(text: str) -> dict[str, str]:
    """The output that a document shows, by the arguments of `miniinfer`."""
    return {match["arguments"]: match["output"] for match in SHOWN.finditer(text)}


def refreshed(text: str) -> str:
    """The document with the output that the commands have now."""

    def block(match: re.Match[str]) -> str:
        arguments = match["arguments"]
        return f"```text\n$ miniinfer {arguments}\n{help_text(arguments.split())}```"

    return SHOWN.sub(block, text)


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text()))
