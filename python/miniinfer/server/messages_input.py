"""The messages of a /v1/messages body as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import invalid
from .messages_protocol import (
    AssistantMessage,
    CountTokensRequest,
    InputMessage,
    SystemMessage,
    TextInput,
    TextOnly,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
)
from .protocol import ChatMessage, ContentPart, FunctionCall, ToolCall


def chat_messages(body: CountTokensRequest) -> list[ChatMessage]:
    """Return the body's conversation as a chat, the system prompt first.

    Messages of one role in a row become one, as they are one turn. Raises `ApiError` 400 for
    empty messages and for the result of a tool use that has not been.
    """
    if not body.messages:
        raise invalid("messages", "messages must hold at least one message", "empty_prompt")
    chat = _Chat()
    chat.add_texts("system", _texts(body.system or []))
    for position, message in enumerate(body.messages):
        chat.add(message, f"messages[{position}]")
    return chat.messages


class _Chat:
    """Gathers a chat message by message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._tool_uses: set[str] = set()

    def add(self, message: InputMessage, name: str) -> None:
        """Take in one message of the body."""
        if isinstance(message, AssistantMessage):
            self._add_answer(message)
            return
        if not message.content:
            raise invalid("messages", f"{name}.content must not be empty")
        if isinstance(message, SystemMessage):
            self.add_texts("system", _texts(message.content))
        elif isinstance(message.content, str):
            self.add_texts("user", [message.content])
        else:
            for block in message.content:
                if isinstance(block, TextInput):
                    self.add_texts("user", [block.text])
                else:
                    self._add_result(block, name)

    def add_texts(self, role: str, texts: Sequence[str]) -> None:
        """Append texts to the last message if that has the same role, else to a new one."""
        for text in texts:
            last = self.messages[-1] if self.messages else None
            if last is None or last.role != role:
                self.messages.append(ChatMessage(role=role, content=text))
            elif isinstance(last.content, list):
                last.content.append(ContentPart(type="text", text=text))
            else:
                both = (last.content or "", text)
                last.content = [ContentPart(type="text", text=each) for each in both]

    def _add_answer(self, message: AssistantMessage) -> None:
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant", content=""))
        answer = self.messages[-1]
        if isinstance(message.content, str):
            answer.content = f"{answer.content}{message.content}"
            return
        for block in message.content:
            if isinstance(block, TextInput):
                answer.content = f"{answer.content}{block.text}"
            elif isinstance(block, ThinkingInput):
                answer.reasoning_content = (answer.reasoning_content or "") + block.thinking
            elif isinstance(block, ToolUseInput):
                function = FunctionCall(name=block.name, arguments=block.input)
                call = ToolCall(id=block.id, function=function)
                answer.tool_calls = [*(answer.tool_calls or ()), call]
                self._tool_uses.add(block.id)

    def _add_result(self, block: ToolResultInput, name: str) -> None:
        if block.tool_use_id not in self._tool_uses:
            raise invalid(
                "messages",
                f"{name} has a tool_result for {block.tool_use_id!r}, which no tool_use before "
                "has as its id",
            )
        self.messages.append(
            ChatMessage(
                role="tool",
                content="".join(_texts(block.content or [])),
                tool_call_id=block.tool_use_id,
            )
        )


def _texts(content: str | list[TextOnly]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]
