"""What a loaded tokenizer consists of, whatever it was loaded from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

__all__ = ["TokenizerError", "TokenizerParts"]


class TokenizerError(ValueError):
    """The tokenizer's files are missing, malformed or of a kind that is not supported."""


@dataclass
class TokenizerParts:
    """A tokenizer as its files describe it."""

    backend: Backend
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Names that templates know (`bos_token`, `eos_token`, ...) to token texts."""
    eos_token_ids: tuple[int, ...] | None = None
    """Ids that end an answer; `None`: that of `eos_token`, if there is one."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Template name to Jinja source; a model's only template is `default`."""
