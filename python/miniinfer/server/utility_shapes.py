"""The answers of the routes that generate nothing, and of /generate."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .errors import ErrorObject
from .responses import Usage


class Model(msgspec.Struct, kw_only=True):
    """A model under one of its served names."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "miniinfer"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: str = "list"
    data: list[Model]


class Tokens(msgspec.Struct, kw_only=True):
    """A text's ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(msgspec.Struct):
    """The text of ids."""

    prompt: str


class Health(msgspec.Struct):
    """One of loading, failed, dead, draining, overloaded and ok."""

    status: str


class HealthDetails(msgspec.Struct):
    """The health with the engine's counters, and why it died if it did."""

    status: str
    stats: dict[str, Any] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """The server's version."""

    version: str


class Load(msgspec.Struct):
    """Generating requests in flight, and what of them has no first token."""

    server_load: int
    queued_requests: int
    queued_tokens: int


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """A whole answer of /generate; `stop_reason` is eos, stop or max_tokens."""

    request_id: str
    text: str
    token_ids: list[int]
    finished: bool = True
    stop_reason: str
    usage: Usage


class GenerateEvent(msgspec.Struct, kw_only=True):
    """An event of /generate; the last has a `stop_reason`, cancelled or error after a failure."""

    request_id: str
    text: str
    finished: bool
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET
