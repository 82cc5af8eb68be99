"""What requests may not ask for, each with a 400 that names it."""

from __future__ import annotations

from .errors import ApiError, invalid
from .field_types import NEUTRAL
from .protocol import ChatRequest, GenerationRequest

_REFUSED = {
    "use_beam_search": "answers are sampled",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
}
"""Parameters of every route that are known and not offered, and what to do instead."""

_REFUSED_IN_CHATS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "answers are not predicted",
    "audio": "answers are text",
    "web_search_options": "there is no web search",
}


def refuse_unsupported(body: GenerationRequest) -> None:
    """Raise a 400 for a parameter that this server knows but does not offer."""
    _refuse(body, _REFUSED)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if body.cache_salt == "":
        raise invalid("cache_salt", "cache_salt must not be an empty string")


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """Raise a 400 as `refuse_unsupported` does, and for what only chats may ask."""
    refuse_unsupported(body)
    _refuse(body, _REFUSED_IN_CHATS)
    if body.modalities not in (None, [], ["text"]):
        raise unsupported("modalities", f"answers are text, got {body.modalities}")


def unsupported(param: str, instead: str) -> ApiError:
    """Return the 400 of a parameter that is known and not offered."""
    return invalid(param, f"{param} is not supported: {instead}", "unsupported_parameter")


def _refuse(body: GenerationRequest, refused: dict[str, str]) -> None:
    for name, instead in refused.items():
        value = getattr(body, name)
        # Equal alone is too little: 0 equals False.
        if not any(type(value) is type(each) and value == each for each in NEUTRAL):
            raise unsupported(name, instead)
