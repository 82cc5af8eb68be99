"""Typed reading of a model's settings, from config.json or from GGUF metadata alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import ModelLoadError

__all__ = ["Settings"]

_REQUIRED: Any = object()


class Settings:
    """A mapping of untrusted settings, read with checks.

    `values`: the settings. `path`: the file they came from, named in errors. `prefix`: put before
    each key (GGUF names settings after the architecture). A setting that is null counts as absent.
    Every reader raises `ModelLoadError` naming file, key and value when the value is not of its
    kind, or when it is absent and has no default.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error for `key`."""
        raise ModelLoadError(f"{self._path}: {self._prefix}{key} {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is, or `default`."""
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED:
            self.fail(key, "is missing")
        return value

    def integer(self, key: str, default: Any = _REQUIRED, limit: int = 2**31 - 1) -> Any:
        """A positive integer up to `limit`."""
        value = self._required(key, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.fail(key, f"must be a positive integer, not {value!r}")
        if value > limit:
            self.fail(key, f"of {value} exceeds the limit of {limit}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A positive finite number, as float."""
        value = self._required(key, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"must be a number, not {value!r}")
        if not 0 < value < float("inf"):
            self.fail(key, f"must be a positive finite number, not {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, several, or none."""
        value = self.get(key, ())
        ids = (value,) if isinstance(value, int) else value
        if not isinstance(ids, list | tuple):
            self.fail(key, f"must be a token id or a list of them, not {value!r}")
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                self.fail(key, f"must hold token ids, not {item!r}")
        return tuple(ids)

    def section(self, key: str) -> Settings | None:
        """The settings nested under `key`, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, f"must be an object, not {value!r}")
        return Settings(value, self._path)
