"""The bodies of POST /v1/messages and /v1/messages/count_tokens; unknown fields are ignored.

Names follow Anthropic's API reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .errors import invalid
from .field_types import (
    Effort,
    NonEmpty,
    Refused,
    Temperature,
    TokenLimit,
    ToolName,
    ToolParameters,
    TopK,
    TopP,
)

_REFUSED = ("container", "mcp_servers")


def _one_of(*names: str) -> Any:
    return Meta(extra_json_schema={"enum": names})


ChoiceType: TypeAlias = Annotated[str, _one_of("auto", "any", "tool", "none")]
ThinkingType: TypeAlias = Annotated[
    str, _one_of("enabled", "adaptive", "between_tools", "disabled")
]


class TextInput(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class TextOnly(msgspec.Struct):
    """Text, where nothing else may stand."""

    # A tag would not do: msgspec lets it be missing where it tells nothing apart.
    type: Literal["text"]
    text: str


class ThinkingInput(msgspec.Struct, tag_field="type", tag="thinking"):
    """What an earlier answer thought; its signature is not looked at."""

    thinking: str


class RedactedThinkingInput(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """What another server has hidden; it is left out."""


class ToolUseInput(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A tool that an earlier answer wanted used."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultInput(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    """What the use of a tool has come to."""

    tool_use_id: str
    content: str | list[TextOnly] | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user"):
    """What the user says, and the results of tools."""

    content: (
        NonEmpty
        | Annotated[list[TextInput | ToolResultInput], Meta(extra_json_schema={"minItems": 1})]
    )


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    """An earlier answer, or the beginning of this one."""

    content: str | list[TextInput | ThinkingInput | RedactedThinkingInput | ToolUseInput]


class SystemMessage(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions in the course of a conversation."""

    content: NonEmpty | Annotated[list[TextOnly], Meta(extra_json_schema={"minItems": 1})]


InputMessage: TypeAlias = UserMessage | AssistantMessage | SystemMessage


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may use; `input_schema` is the JSON schema of an object."""

    name: ToolName
    type: Annotated[str, Meta(extra_json_schema={"const": "custom"})] | None = None
    description: str | None = None
    input_schema: ToolParameters | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools may or must be used; `name` is for the type tool."""

    type: ChoiceType
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Whose request it is."""

    user_id: str | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first; the budget is not enforced."""

    type: ThinkingType
    budget_tokens: TokenLimit | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form that the text must have."""

    type: Annotated[str, Meta(extra_json_schema={"const": "json_schema"})]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What is asked of the output."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made from."""

    messages: Annotated[list[InputMessage], Meta(extra_json_schema={"minItems": 1})]
    model: str | None = None
    system: str | list[TextOnly] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: TokenLimit
    stream: bool | None = None
    stop_sequences: list[NonEmpty] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    # Refused when set: ignoring them would change the answer.
    container: Refused = None
    mcp_servers: Refused = None


def check_body(body: MessagesRequest) -> None:
    """Raise a 400 for what this server does not offer."""
    for name in _REFUSED:
        if getattr(body, name) is not None:
            raise invalid(name, f"{name} is not supported", "unsupported_parameter")
    if body.max_tokens < 1:
        raise invalid("max_tokens", f"max_tokens must be at least 1, got {body.max_tokens}")
