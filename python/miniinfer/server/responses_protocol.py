"""The body of POST /v1/responses; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from .errors import invalid
from .field_types import (
    Alternatives,
    Effort,
    FormType,
    FunctionType,
    Refused,
    Temperature,
    TokenLimit,
    ToolChoiceName,
    TopP,
)

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    (
        LOGPROBS,
        # Of tools and inputs that this server refuses, so there is never anything to include.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
        # Reasoning is open here: its text is always in the item.
        "reasoning.encrypted_content",
    )
)
_REFUSED = ("conversation", "prompt", "max_tool_calls", "context_management", "moderation")
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

Include: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": sorted(_INCLUDES)})]
Truncation: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": ["auto", "disabled"]})]
Foreground: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": False})]


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One part of an item's content."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of the input; without a type it is a message."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: FunctionType
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that the text must have."""

    type: FormType
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """What is asked of the reasoning."""

    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(extra_json_schema={"minItems": 1})]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[Include] | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Alternatives | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoiceName | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Truncation | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # Refused when set to anything but their neutral value: ignoring them would change the answer.
    background: Foreground | None = None
    conversation: Refused = None
    prompt: Refused = None
    max_tool_calls: Refused = None
    context_management: Refused = None
    moderation: Refused = None


def check_body(body: ResponsesRequest) -> None:
    """Raise a 400 for what this server does not offer, and for values that do not go together."""
    refused = [name for name in _REFUSED if getattr(body, name) is not None]
    if body.background:
        refused.append("background")
    for name in refused:
        raise invalid(name, f"{name} is not supported", "unsupported_parameter")
    for name in body.include or ():
        if name not in _INCLUDES:
            raise invalid(
                "include", f"include must hold names from {sorted(_INCLUDES)}, got {name!r}"
            )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise invalid("top_logprobs", f"top_logprobs needs include to hold {LOGPROBS!r}")
    if body.truncation not in (None, "auto", "disabled"):
        raise invalid(
            "truncation", f"truncation must be 'auto' or 'disabled', got {body.truncation!r}"
        )
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"metadata may hold {MAX_METADATA} keys, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise invalid(
                "metadata",
                f"metadata keys may have {MAX_METADATA_KEY} characters, got {len(key)}: {key!r}",
            )
        if len(value) > MAX_METADATA_VALUE:
            raise invalid(
                "metadata",
                f"metadata values may have {MAX_METADATA_VALUE} characters, "
                f"got {len(value)} for {key!r}",
            )
