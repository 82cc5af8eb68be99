"""A tool's input from the JSON text that a model wrote, be it whole or cut."""

from __future__ import annotations

from typing import Any

import msgspec

_CLOSING = {"{": "}", "[": "]"}


def tool_input(text: str) -> dict[str, Any]:
    """Return the object that JSON text stands for.

    Of text that was cut, all that is certain: members whose values are whole. Of text that is no
    object, nothing.
    """
    for candidate in (text, _completed(text)):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _completed(text: str) -> str:
    """Cut the text behind its last whole value, and close what is open there."""
    end = 0
    open_brackets: list[str] = []
    in_string = escaped = False
    for position, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character == ",":
            end = position
        elif character in _CLOSING:
            open_brackets.append(_CLOSING[character])
            end = position + 1
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
            end = position + 1
    # Whatever opens or closes moves the end, so the same brackets are open there as here.
    return text[:end] + "".join(reversed(open_brackets))
