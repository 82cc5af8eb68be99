"""Messages about settings in the words of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator


def with_flags(message: str, parser: argparse.ArgumentParser) -> str:
    """Return a message in which the settings that a command has flags for are called as those are.

    Settings are told from other words by their underscores, or by standing at the start before
    "must".
    """
    names = long_flags(parser)

    def flag(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return re.sub(r"^[a-z]\w*(?= must\b)|(?<![\w./-])[a-z]+(?:_[a-z]+)+(?![\w/-])", flag, message)


def long_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long flag of each setting, by the name of its value and by its own."""
    flags = {}
    for action in _actions(parser):
        long = [option for option in action.option_strings if option.startswith("--")]
        if long:
            flags[action.dest] = flags[long[0][2:].replace("-", "_")] = long[0]
    return flags


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
