"""The bodies that requests may send; unknown fields are ignored.

Types are checked while decoding, ranges by `params` and `miniinfer.SamplingParams`. Names follow
OpenAI's API reference, and vLLM where OpenAI has none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .errors import invalid


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports about its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that every generating route shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # Refused when set to anything but their neutral value: ignoring them would change the answer.
    structured_outputs: Any = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content."""

    type: str
    text: str | UnsetType = UNSET


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of an earlier tool call; `arguments` is JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call that an earlier answer made."""

    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class GenerateRequest(GenerationRequest, kw_only=True):
    """POST /generate."""

    prompt: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Any]
    model: str | None = None


_REFUSED = (
    "structured_outputs",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "truncate_prompt_tokens",
)


def refuse_unsupported(body: GenerationRequest) -> None:
    """Raise a 400 for a parameter that this server knows but does not offer."""
    for name in _REFUSED:
        value = getattr(body, name)
        if value is not None and value is not False and value != []:
            raise invalid(name, f"{name} is not supported", "unsupported_parameter")
    if body.response_format is not None and body.response_format.get("type") != "text":
        kind = body.response_format.get("type")
        raise invalid(
            "response_format",
            f"response_format.type must be 'text', got {kind!r}",
            "unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if body.cache_salt == "":
        raise invalid("cache_salt", "cache_salt must not be an empty string")


def refuse_tools(body: ChatRequest) -> None:
    """Raise a 400 for a chat that wants tool calls; tools with tool_choice none are fine."""
    for name in ("functions", "function_call"):
        if getattr(body, name) not in (None, [], "none"):
            raise invalid(name, f"{name} is not supported", "unsupported_parameter")
    if body.tool_choice == "none" or (not body.tools and body.tool_choice in (None, "auto")):
        return
    name = "tools" if body.tools else "tool_choice"
    raise invalid(name, f"{name}: tool calls are not supported", "unsupported_parameter")
