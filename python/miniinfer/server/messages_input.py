"""The messages of a /v1/messages body as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from .errors import ApiError, invalid
from .messages_protocol import CountTokensRequest, InputBlock, InputMessage
from .protocol import ChatMessage, ContentPart, FunctionCall, ToolCall

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The roles, and the types of block that their messages may have."""
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


def chat_messages(body: CountTokensRequest) -> list[ChatMessage]:
    """Return the body's conversation as a chat, the system prompt first.

    Messages of one role in a row become one, as they are one turn. Raises `ApiError` 400 for
    blocks that are not taken and for the result of a tool use that has not been.
    """
    if not body.messages:
        raise invalid("messages", "messages must hold at least one message", "empty_prompt")
    builder = _Chat()
    if body.system is not None:
        builder.add_text("system", _checked(body.system, "system", "system"))
    for position, message in enumerate(body.messages):
        builder.add(message, f"messages[{position}]")
    return builder.messages


class _Chat:
    """Gathers a chat message by message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._tool_uses: set[str] = set()

    def add(self, message: InputMessage, name: str) -> None:
        """Take in one message of the body."""
        if message.role not in _BLOCKS:
            roles = list(_BLOCKS)
            raise invalid("messages", f"{name}.role must be one of {roles}, got {message.role!r}")
        blocks = _checked(message.content, f"{name}.content", message.role)
        if message.role == "assistant":
            self._add_answer(blocks)
            return
        if not blocks:
            raise invalid("messages", f"{name}.content must not be empty")
        texts: list[InputBlock] = []
        for block in blocks:
            if block.type == "text":
                texts.append(block)
                continue
            self.add_text(message.role, texts)
            texts = []
            self._add_result(block, name)
        self.add_text(message.role, texts)

    def add_text(self, role: str, blocks: Sequence[InputBlock]) -> None:
        """Append text to the last message if that has the same role, else in a new one."""
        parts = [ContentPart(type="text", text=block.text or "") for block in blocks]
        if not parts:
            return
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == role:
            before = last.content
            if not isinstance(before, list):
                before = [ContentPart(type="text", text=before or "")]
            last.content = [*before, *parts]
        else:
            content = _text(blocks) if len(parts) == 1 else parts
            self.messages.append(ChatMessage(role=role, content=content))

    def _add_answer(self, blocks: Sequence[InputBlock]) -> None:
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant", content=""))
        answer = self.messages[-1]
        answer.content = f"{answer.content}{_text(blocks)}"
        thoughts = "".join(block.thinking or "" for block in blocks)
        if thoughts:
            answer.reasoning_content = (answer.reasoning_content or "") + thoughts
        calls = [
            ToolCall(
                id=block.id or "",
                function=FunctionCall(name=block.name or "", arguments=block.input),
            )
            for block in blocks
            if block.type == "tool_use"
        ]
        if calls:
            answer.tool_calls = [*(answer.tool_calls or ()), *calls]
            self._tool_uses.update(call.id for call in calls if call.id is not UNSET)

    def _add_result(self, block: InputBlock, name: str) -> None:
        tool_use_id = block.tool_use_id or ""
        if tool_use_id not in self._tool_uses:
            raise invalid(
                "messages",
                f"{name} has a tool_result for {tool_use_id!r}, which no tool_use before has as id",
            )
        result = _checked(block.content or "", f"{name}.content of {tool_use_id!r}", "system")
        self.messages.append(
            ChatMessage(role="tool", content=_text(result), tool_call_id=tool_use_id)
        )


def _checked(content: str | list[InputBlock], name: str, role: str) -> list[InputBlock]:
    """Return content as blocks, all of a type that the role may have and with what it needs."""
    if isinstance(content, str):
        return [InputBlock(type="text", text=content)] if content else []
    for position, block in enumerate(content):
        place = f"{name}[{position}]"
        if block.type not in _BLOCKS[role]:
            raise invalid(
                "messages",
                f"{place}.type must be one of {list(_BLOCKS[role])}, got {block.type!r}",
                "unsupported_parameter",
            )
        for field in _NEEDED[block.type]:
            if getattr(block, field) is None:
                raise _missing(f"{place}.{field}")
    return content


def _text(blocks: Sequence[InputBlock]) -> str:
    return "".join(block.text or "" for block in blocks)


def _missing(name: str) -> ApiError:
    return invalid("messages", f"{name} is required")
