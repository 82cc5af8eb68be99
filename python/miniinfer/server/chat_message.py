"""Parts of an answer to the message of a whole answer, or to the deltas of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec import UNSET

from miniinfer.parsing import Part

from .chat_shapes import (
    AssistantMessage,
    CalledFunction,
    ChatDelta,
    FunctionDelta,
    MessageToolCall,
    ToolCallDelta,
)


def new_call_id() -> str:
    """Return an id that no other tool call has."""
    return f"call_{uuid.uuid4().hex}"


def chat_delta(part: Part) -> ChatDelta:
    """Return a part as what it adds to a message; a call gets its id here."""
    if part[0] == "reasoning":
        return ChatDelta(reasoning_content=part[1])
    if part[0] == "content":
        return ChatDelta(content=part[1])
    if part[0] == "tool_call":
        function = FunctionDelta(name=part[2], arguments="")
        call = ToolCallDelta(index=part[1], id=new_call_id(), type="function", function=function)
    else:
        call = ToolCallDelta(index=part[1], function=FunctionDelta(arguments=part[2]))
    return ChatDelta(tool_calls=[call])


class MessageBuilder:
    """Gathers the parts of one choice into its message."""

    def __init__(self, content: str = "") -> None:
        self._content = [content]
        self._reasoning: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, parts: Sequence[Part]) -> None:
        """Append parts, in the order in which they came."""
        for part in parts:
            if part[0] == "reasoning":
                self._reasoning.append(part[1])
            elif part[0] == "content":
                self._content.append(part[1])
            elif part[0] == "tool_call":
                self._names.append(part[2])
                self._arguments.append([])
            else:
                self._arguments[part[1]].append(part[2])

    def message(self) -> AssistantMessage:
        """Return the message; call it once, as calls get their ids here."""
        content = "".join(self._content)
        calls = [
            MessageToolCall(
                id=new_call_id(),
                function=CalledFunction(name=name, arguments="".join(arguments)),
            )
            for name, arguments in zip(self._names, self._arguments, strict=True)
        ]
        return AssistantMessage(
            content=None if calls and not content else content,
            reasoning_content="".join(self._reasoning) if self._reasoning else UNSET,
            tool_calls=calls or UNSET,
        )
