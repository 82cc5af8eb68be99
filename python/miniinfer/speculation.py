"""Speculative decoding as `speculative_config` asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import _Limits

__all__ = ["SpeculativeConfig"]

_METHOD = "ngram"
_MOST_TOKENS = 64
# Longest n-gram that the core looks up.
_LONGEST = 16
_DEFAULT_MIN, _DEFAULT_MAX = 2, 4

_ROWS_PER_STEP = {"cpu": 5.0}
"""Rows that take as long to compute as a step without any, by the type of the device.

Of the built-in model's matrices on two cores, one row took 94 ms and eight 199 ms in float32:
15 ms a row, and 79 ms whatever the rows."""
_ROWS_PER_STEP_ELSEWHERE = 128.0
"""Where reading the weights takes as long as computing so many rows or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Drafts looked up in a request's own tokens, and verified several in a step.

    The names are vLLM's. Raises `ValueError` naming the key, its limit and its value.
    """

    num_speculative_tokens: int
    """Most drafts verified for a request in a step."""
    prompt_lookup_min: int = _DEFAULT_MIN
    """Fewest tokens that must have occurred before."""
    prompt_lookup_max: int = _DEFAULT_MAX
    """Most tokens that are looked for."""
    method: str = _METHOD
    """How drafts are made: ngram."""

    def __post_init__(self) -> None:
        """Check each value."""
        _check_method(self.method)
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, _MOST_TOKENS)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, _LONGEST)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, _LONGEST)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            limit = f"at most prompt_lookup_max, {self.prompt_lookup_max}"
            _refuse("prompt_lookup_min", limit, self.prompt_lookup_min)

    @classmethod
    def parse(cls, value: object) -> SpeculativeConfig:
        """Read a mapping, or the text of a JSON object. Of the two lengths one may be left out."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"speculative_config must be a JSON object: {error}") from None
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config must be a mapping, got {value!r}")
        # First: what other methods take are keys that this one does not know.
        if value.get("method") is not None:
            _check_method(value["method"])
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise ValueError(
                    f"speculative_config has no key {key!r}; it takes {', '.join(known)}"
                )
        if value.get("num_speculative_tokens") is None:
            raise ValueError("speculative_config must have num_speculative_tokens")
        return cls(**_with_both_lengths(value))

    def as_dict(self) -> dict[str, object]:
        """Every key and its value."""
        return asdict(self)

    def limits(self, device_type: str) -> _Limits:
        """What the core is to know, for a model on such a device."""
        rows_per_step = _ROWS_PER_STEP.get(device_type, _ROWS_PER_STEP_ELSEWHERE)
        return {
            "max_draft_tokens": self.num_speculative_tokens,
            "ngram_lookup": {
                "min": self.prompt_lookup_min,
                "max": self.prompt_lookup_max,
                "rows_per_step": rows_per_step,
            },
        }


def _with_both_lengths(given: Mapping[str, object]) -> dict[str, Any]:
    """The one that is left out gives way to the other."""
    values = {key: value for key, value in given.items() if value is not None}
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if high is None and isinstance(low, int):
        values["prompt_lookup_max"] = max(low, _DEFAULT_MAX)
    if low is None and isinstance(high, int):
        values["prompt_lookup_min"] = min(high, _DEFAULT_MIN)
    return values


def _check_method(value: object) -> None:
    if value != _METHOD:
        _refuse("method", f"{_METHOD!r}", value)


def _check_integer(key: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        _refuse(key, f"an integer from 1 to {high}", value)


def _refuse(key: str, limit: str, value: object) -> None:
    raise ValueError(f"{key} of speculative_config must be {limit}, got {value!r}")
