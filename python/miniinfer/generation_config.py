"""Sampling defaults that a model's files recommend."""

from __future__ import annotations

import json
from typing import Any

from .source import ModelSource

__all__ = ["generation_defaults"]

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(source: ModelSource) -> dict[str, Any]:
    """The recommendations of `generation_config.json` under the names of `SamplingParams`.

    Empty for GGUF files, which have none, and where the file is missing or no JSON object: it is
    advice, and a model loads without it.
    """
    if source.kind != "hf":
        return {}
    try:
        values = json.loads((source.path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    found = {ours: values[theirs] for theirs, ours in _NAMES.items() if theirs in values}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value is not None}
