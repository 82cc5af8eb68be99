"""A /v1/messages body as the chat that it amounts to."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from .errors import invalid
from .messages_input import chat_messages
from .messages_protocol import CountTokensRequest, MessagesRequest, Thinking, Tool
from .protocol import (
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
)

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}
"""What parameters of a chat are called here."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def prompt_request(body: CountTokensRequest) -> ChatRequest:
    """Return the chat of a body, as far as its prompt goes; raises `ApiError` 400.

    A last message of the assistant is one that the answer continues, unless it is a tool use.
    """
    messages = chat_messages(body)
    last = messages[-1]
    config = body.output_config
    return ChatRequest(
        messages=messages,
        model=body.model,
        continue_final_message=last.role == "assistant" and not last.tool_calls,
        chat_template_kwargs=_thinking(body.thinking),
        reasoning_effort=config.effort if config else None,
        response_format=_response_format(body),
        tools=[_definition(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())]
        or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False
        if body.tool_choice and body.tool_choice.disable_parallel_tool_use
        else None,
    )


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the whole chat of a body, but for `max_tokens`; raises `ApiError` 400."""
    request = prompt_request(body)
    request.stream = body.stream
    request.stop = body.stop_sequences or None
    request.temperature = body.temperature
    request.top_p = body.top_p
    request.top_k = body.top_k
    request.user = body.metadata.user_id if body.metadata else None
    return request


def _thinking(thinking: Thinking | None) -> dict[str, Any] | None:
    if thinking is None:
        return None
    if thinking.type not in _THINKS:
        raise invalid(
            "thinking", f"thinking.type must be one of {list(_THINKS)}, got {thinking.type!r}"
        )
    budget = thinking.budget_tokens
    if budget is not None and budget < 1:
        raise invalid("thinking", f"thinking.budget_tokens must be at least 1, got {budget}")
    return {"enable_thinking": _THINKS[thinking.type]}


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    wanted = body.output_config.format if body.output_config else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise invalid(
            "output_config",
            f"output_config.format.type must be 'json_schema', got {wanted.type!r}",
        )
    schema = JsonSchemaFormat(name="output", schema=wanted.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _definition(tool: Tool, name: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise invalid(
            "tools",
            f"{name}.type must be 'custom', got {tool.type!r}",
            "unsupported_parameter",
        )
    if tool.input_schema is None:
        raise invalid("tools", f"{name}.input_schema is required")
    return ToolDefinition(
        function=FunctionDefinition(
            name=tool.name,
            description=UNSET if tool.description is None else tool.description,
            parameters=tool.input_schema,
            strict=UNSET if tool.strict is None else tool.strict,
        )
    )


def _tool_choice(body: CountTokensRequest) -> str | NamedToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice", "tool_choice.name is required for the type 'tool'")
        return NamedToolChoice(function=FunctionName(name=choice.name))
    if choice.type not in _CHOICES:
        kinds = [*_CHOICES, "tool"]
        raise invalid(
            "tool_choice", f"tool_choice.type must be one of {kinds}, got {choice.type!r}"
        )
    return _CHOICES[choice.type]
