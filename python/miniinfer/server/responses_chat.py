"""A /v1/responses body as the chat that it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from .chat_prepare import PreparedChat, prepare_chat
from .engine_api import Engine
from .errors import ApiError, invalid, renamed
from .protocol import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
)
from .responses_protocol import LOGPROBS, FunctionTool, ResponsesRequest, TextFormat
from .state import ServerState

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What parameters of a chat are called here."""


async def prepare_response(
    state: ServerState, engine: Engine, body: ResponsesRequest, messages: list[ChatMessage]
) -> PreparedChat:
    """Check the body and turn it into work; raises `ApiError` 400.

    With truncation "auto", the oldest turns of a conversation that is too long are left out, as
    few as possible: never the system messages at its head, nor the last turn.
    """
    try:
        try:
            return await prepare_chat(state, engine, chat_request(body, messages))
        except ApiError as error:
            if body.truncation != "auto" or error.code != "context_length_exceeded":
                raise
        return await _prepare_truncated(state, engine, body, messages)
    except ApiError as error:
        raise renamed(error, _NAMES) from error


async def _prepare_truncated(
    state: ServerState, engine: Engine, body: ResponsesRequest, messages: list[ChatMessage]
) -> PreparedChat:
    head = 0
    while head < len(messages) and messages[head].role in ("system", "developer"):
        head += 1
    starts = [at for at in range(head + 1, len(messages)) if messages[at].role == "user"]
    if not starts:
        return await prepare_chat(state, engine, chat_request(body, messages))
    # Prompts get shorter with every turn that is left out, so the first that fits can be bisected.
    fitting: PreparedChat | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        kept = messages[:head] + messages[starts[middle] :]
        try:
            fitting = await prepare_chat(state, engine, chat_request(body, kept))
            high = middle
        except ApiError as error:
            if error.code != "context_length_exceeded" or middle == len(starts) - 1:
                raise
            low = middle + 1
    assert fitting is not None, "the last turn alone has been tried"
    return fitting


def chat_request(body: ResponsesRequest, messages: list[ChatMessage]) -> ChatRequest:
    """Return the chat of a body whose items have become messages; raises `ApiError` 400."""
    tools, choice = _tools(body)
    with_logprobs = LOGPROBS in (body.include or ())
    return ChatRequest(
        messages=messages,
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs if with_logprobs else None,
        response_format=_response_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        user=body.user or body.safety_identifier,
    )


def _response_format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema is None:
        raise invalid("text", "text.format.schema is required for the type json_schema")
    return ResponseFormat(
        type=wanted.type,
        json_schema=JsonSchemaFormat(
            name=wanted.name,
            description=wanted.description,
            schema=wanted.schema,
            strict=wanted.strict,
        ),
    )


def _tools(
    body: ResponsesRequest,
) -> tuple[list[ToolDefinition] | None, str | NamedToolChoice | None]:
    tools = [
        _definition(tool, f"tools[{position}]") for position, tool in enumerate(body.tools or ())
    ]
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools or None, choice
    if choice.get("type") == "function":
        return tools or None, NamedToolChoice(function=FunctionName(name=_choice_name(choice)))
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    raise invalid(
        "tool_choice",
        f"tool_choice.type must be 'function' or 'allowed_tools', got {choice.get('type')!r}",
        "unsupported_parameter",
    )


def _allowed(
    tools: Sequence[ToolDefinition], choice: dict[str, Any]
) -> tuple[list[ToolDefinition] | None, str]:
    """Leave only the tools that the choice allows."""
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", f"tool_choice.mode must be auto or required, got {mode!r}")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise invalid("tool_choice", "tool_choice.tools must be a list of objects")
    names = [_choice_name(tool) for tool in allowed]
    known = {tool.function.name for tool in tools}
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"tool_choice.tools names {name!r}, which is not in tools")
    return [tool for tool in tools if tool.function.name in names] or None, mode


def _choice_name(choice: dict[str, Any]) -> str:
    name = choice.get("name")
    if not isinstance(name, str):
        raise invalid("tool_choice", f"tool_choice needs the name of a function, got {name!r}")
    return name


def _definition(tool: FunctionTool, name: str) -> ToolDefinition:
    if tool.type != "function":
        raise invalid(
            "tools",
            f"{name}.type must be 'function', got {tool.type!r}",
            "unsupported_parameter",
        )
    if tool.name is None:
        raise invalid("tools", f"{name}.name is required")
    return ToolDefinition(
        function=FunctionDefinition(
            name=tool.name,
            description=UNSET if tool.description is None else tool.description,
            parameters=UNSET if tool.parameters is None else tool.parameters,
            strict=UNSET if tool.strict is None else tool.strict,
        )
    )
