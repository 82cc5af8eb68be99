"""Checks of single values, each with one form of message."""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

__all__ = [
    "INT32_MAX",
    "ParameterError",
    "boolean",
    "integer",
    "number",
    "number_between",
    "refuse",
    "strings",
    "text",
    "token_ids",
]

INT32_MAX = 2**31 - 1


class ParameterError(ValueError):
    """A sampling parameter has a value that cannot be served.

    `param` is the parameter's name, `message` one sentence with the limit and the value.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return self.message


def refuse(param: str, limit: str, value: object) -> NoReturn:
    """Raise `ParameterError` with the limit and the value."""
    shown = repr(value)
    if len(shown) > 100:
        shown = f"{shown[:97]}..."
    raise ParameterError(param, f"{param} must be {limit}; got {shown}")


def boolean(param: str, value: object) -> bool:
    """`value`, which must be true or false."""
    if not isinstance(value, bool):
        refuse(param, "true or false", value)
    return value


def integer(param: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse(param, "an integer", value)
    converted = int(value)
    if converted < low:
        refuse(param, f"at least {low}", _printable(converted))
    if converted > high:
        refuse(param, f"at most {high}", _printable(converted))
    return converted


def _printable(number: int) -> object:
    # CPython refuses to print integers of more than some 4300 digits.
    return number if number.bit_length() <= 1024 else f"an integer of {number.bit_length()} bits"


def number(param: str, value: Any) -> float:
    """`value` as a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(param, "a number", value)
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        refuse(param, "a finite number", converted)
    return converted


def number_between(param: str, value: object, low: float, high: float) -> float:
    """`value` as a number from `low` to `high`."""
    checked = number(param, value)
    if not low <= checked <= high:
        refuse(param, f"between {low} and {high}", checked)
    return checked


def text(param: str, value: object) -> str:
    """`value` as a text that UTF-8 can carry."""
    if not isinstance(value, str):
        refuse(param, "a string", value)
    if any("\ud800" <= character <= "\udfff" for character in value):
        refuse(param, "valid Unicode, without lone surrogates", value)
    return value


def strings(param: str, value: object) -> list[str]:
    """`value` as a list of texts of at least one character."""
    if not isinstance(value, list | tuple):
        refuse(param, "a list of strings", value)
    for item in value:
        if not isinstance(item, str):
            refuse(param, "a list of strings", item)
        if not item:
            refuse(param, "strings of at least one character", item)
        text(param, item)
    return list(value)


def token_ids(param: str, value: object) -> list[int]:
    """`value` as a list of token ids, each once."""
    if not isinstance(value, list | tuple):
        refuse(param, "a list of token ids", value)
    return list(dict.fromkeys(integer(param, item, 0, INT32_MAX) for item in value))
