"""Settings of the HTTP server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from miniinfer.parsing import REASONING_PARSERS, TOOL_PARSERS

from .keys import ApiKey

MAX_CHOICES = 1024
"""Most choices (prompts times n) one HTTP request may ask for."""

MAX_N = 128
"""Largest n, as OpenAI has it."""


_COUNTS = (
    "max_concurrent_requests",
    "max_queued_requests",
    "max_queued_tokens",
    "max_queued_requests_per_key",
    "max_connections",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the server is told from outside; durations in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; empty means the engine's own model name."""
    api_keys: tuple[ApiKey, ...] = ()
    """Any of these opens the server; empty means that no key is needed."""
    metrics_without_key: bool = False
    """Answer /metrics without a key, as /health."""
    share_prefix_cache: bool = False
    """Let API keys hit the prefixes of others, which tells them what others have sent."""
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
    max_queued_requests: int | None = None
    """Requests that may wait for their first token; more are refused with 429."""
    max_queued_tokens: int | None = None
    """Prompt tokens of those from which on requests are refused with 429."""
    max_queued_requests_per_key: int | None = None
    """Requests of one API key that may wait for their first token."""
    max_queue_time: float | None = None
    """Seconds that a request may wait for its first token before it ends with 503."""
    max_connections: int | None = None
    """Open connections; None takes what the limit on file descriptors allows."""
    max_header_size: int = 16 * 1024
    """Largest request line, and largest header field."""
    idle_timeout: float = 75.0
    """Seconds in which a connection must send the headers of its first or next request."""
    body_timeout: float = 60.0
    """Seconds in which a request must send its body."""
    tls_cert: str | None = None
    """File of the certificate chain; turns TLS on."""
    tls_key: str | None = None
    """File of its private key; None means that it is in the same file."""
    otlp_traces_endpoint: str | None = None
    """URL that traces are sent to; None makes none."""
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
        if self.max_header_size < 1024:
            raise ValueError(f"max_header_size must be at least 1 KiB, got {self.max_header_size}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("keep_alive_interval", "shutdown_timeout", "stats_interval"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 0 seconds, got {value}")
        for name in ("stalled_client_timeout", "idle_timeout", "body_timeout", "max_queue_time"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 seconds, got {value}")
        for name, known in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            if value not in ("auto", "none", *known):
                raise ValueError(f"{name} must be auto, none or one of {known}, got {value!r}")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        if any(not name for name in self.served_model_names):
            raise ValueError("a served model name must not be empty")
