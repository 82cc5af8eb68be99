"""Settings of the HTTP server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from miniinfer.parsing import REASONING_PARSERS, TOOL_PARSERS

MAX_CHOICES = 1024
"""Most choices (prompts times n) one HTTP request may ask for."""

MAX_N = 128
"""Largest n, as OpenAI has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the server is told from outside; durations in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; empty means the engine's own model name."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the server; empty means that no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Origins for CORS, or `*`; empty turns CORS off."""
    default_chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    chat_template: str | None = None
    """Text of a template that replaces the model's own."""
    trust_request_chat_template: bool = False
    """Let requests bring a template; it is sandboxed, but one can loop forever."""
    tool_call_parser: str = "auto"
    """The format of the model's tool calls: a name of `TOOL_PARSERS`, auto or none."""
    reasoning_parser: str = "auto"
    """The format of the model's reasoning: a name of `REASONING_PARSERS`, auto or none."""
    max_body_size: int = 10 * 1024 * 1024
    max_concurrent_requests: int | None = None
    """More requests than this at once are refused with 503; None sets no limit."""
    keep_alive_interval: float = 15.0
    """Seconds of silence after which a stream gets an SSE comment; 0 turns it off."""
    stalled_client_timeout: float = 60.0
    """Seconds that a stream waits for a client that does not read, before it is cut off."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    stats_interval: float = 10.0
    """Seconds between two lines of statistics while there is work; 0 turns them off."""
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if self.max_body_size < 1:
            raise ValueError(f"max_body_size must be at least 1 byte, got {self.max_body_size}")
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            raise ValueError(
                f"max_concurrent_requests must be at least 1, got {self.max_concurrent_requests}"
            )
        for name in ("keep_alive_interval", "shutdown_timeout", "stats_interval"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 0 seconds, got {value}")
        if not 0 < self.stalled_client_timeout < float("inf"):
            raise ValueError(
                f"stalled_client_timeout must be above 0 seconds, got {self.stalled_client_timeout}"
            )
        for name, known in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            if value not in ("auto", "none", *known):
                raise ValueError(f"{name} must be auto, none or one of {known}, got {value!r}")
        if any(not key for key in self.api_keys):
            raise ValueError("an API key must not be empty")
        if any(not name for name in self.served_model_names):
            raise ValueError("a served model name must not be empty")
