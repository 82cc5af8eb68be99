"""What `device_check` finds, and at which sizes it looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How large the inputs of the checks are."""

    head_dims: tuple[int, ...]
    context: int
    """Tokens of the longest request of the checks of accuracy."""
    copy_bytes: int
    decodes: int
    decode_context: int
    prefill: int
    """Tokens of a prompt."""
    rows: int
    width: int
    vocab: int
    samples: int
    models: tuple[str, ...]
    prompt: int
    """Tokens of each prompt of an engine."""
    new_tokens: int
    """Tokens of each answer; at least 3, so that there is a pause between two decode steps."""
    seconds: float
    """For all parts together, from the start to the last line."""
    part_seconds: float
    """After which a part is taken for hung. The first launch of each kernel compiles it."""


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    found: str
    """What was found, in words."""
    ok: bool = True
    value: float | None = None
    """The same as a number, if it is one."""
    unit: str = ""

    def line(self) -> str:
        """The line as it is printed."""
        return f"{'ok  ' if self.ok else 'MISS'} {self.name:<52} {self.found}"
