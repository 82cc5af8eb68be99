"""The items of a /v1/responses conversation as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .errors import ApiError, invalid
from .protocol import ChatMessage, ContentPart, FunctionCall, ToolCall
from .responses_objects import OutputItem
from .responses_protocol import InputItem, InputPart, ResponsesRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """Return the body's input as items; raises `ApiError` 400 for items that are not taken."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    for position, item in enumerate(body.input):
        _check_item(item, f"input[{position}]")
    return body.input


def output_items(items: Iterable[OutputItem]) -> list[InputItem]:
    """Return the items of an answer as input for the next."""
    return msgspec.convert(msgspec.to_builtins(list(items)), list[InputItem])


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return checked items as messages, the instructions first.

    What one answer of the model is made of (reasoning, text and calls) becomes one message.
    Raises `ApiError` 400 for the output of a call that was never made.
    """
    builder = _Messages()
    if instructions is not None:
        builder.messages.append(ChatMessage(role="system", content=instructions))
    for item in items:
        builder.add(item)
    return builder.finish()


class _Messages:
    """Gathers messages item by item."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._calls: set[str] = set()

    def add(self, item: InputItem) -> None:
        """Take in one checked item."""
        kind = item.type or "message"
        if kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            self._add_call(item)
        elif kind == "function_call_output":
            self._add_output(item)
        elif item.role == "assistant":
            self._add_answer(_text(item.content))
        else:
            self.messages.append(ChatMessage(role=item.role or "", content=_content(item.content)))

    def finish(self) -> list[ChatMessage]:
        """Return the messages; an answer may have been cut before it had any text."""
        for message in self.messages:
            if message.content is None and not message.tool_calls:
                message.content = ""
        return self.messages

    def _add_reasoning(self, item: InputItem) -> None:
        text = _text(item.content)
        if not text:
            # A summary, or what another model has encrypted.
            return
        turn = self._turn()
        if turn is None or turn.content or turn.tool_calls:
            turn = self._new_turn()
        turn.reasoning_content = (turn.reasoning_content or "") + text

    def _add_answer(self, text: str) -> None:
        turn = self._turn()
        if turn is None or (turn.content and not turn.tool_calls):
            turn = self._new_turn()
        turn.content = f"{turn.content or ''}{text}"

    def _add_call(self, item: InputItem) -> None:
        assert item.call_id is not None, "checked"
        turn = self._turn() or self._new_turn()
        function = FunctionCall(name=item.name or "", arguments=item.arguments)
        turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(id=item.call_id, function=function)]
        self._calls.add(item.call_id)

    def _add_output(self, item: InputItem) -> None:
        assert item.call_id is not None, "checked"
        if item.call_id not in self._calls:
            raise invalid(
                "input", f"no function_call before has the call_id {item.call_id!r} of an output"
            )
        content = _content(item.output)
        self.messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))

    def _turn(self) -> ChatMessage | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == "assistant" else None

    def _new_turn(self) -> ChatMessage:
        self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]


def _content(content: str | list[InputPart] | None) -> str | list[ContentPart]:
    if isinstance(content, list) and len(content) > 1:
        return [ContentPart(type="text", text=part.text or "") for part in content]
    return _text(content)


def _text(content: str | list[InputPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or "" for part in content)
    return content or ""


def _check_item(item: InputItem, name: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        if item.role not in _ROLES:
            raise invalid("input", f"{name}.role must be one of {list(_ROLES)}, got {item.role!r}")
        _check_content(item.content, f"{name}.content", _TEXT_PARTS)
    elif kind == "reasoning":
        if item.content is not None:
            _check_content(item.content, f"{name}.content", ("reasoning_text",))
    elif kind == "function_call":
        for field in ("call_id", "name", "arguments"):
            if getattr(item, field) is None:
                raise _missing(f"{name}.{field}")
    elif kind == "function_call_output":
        if item.call_id is None:
            raise _missing(f"{name}.call_id")
        _check_content(item.output, f"{name}.output", _TEXT_PARTS)
    else:
        raise invalid("input", f"{name}.type {kind!r} is not supported", "unsupported_parameter")


def _check_content(
    content: str | list[InputPart] | None, name: str, kinds: tuple[str, ...]
) -> None:
    if content is None:
        raise _missing(name)
    if isinstance(content, str):
        return
    for position, part in enumerate(content):
        if part.type not in kinds:
            raise invalid(
                "input",
                f"{name}[{position}].type must be one of {list(kinds)}, got {part.type!r}",
                "unsupported_parameter",
            )
        if part.text is None:
            raise _missing(f"{name}[{position}].text")


def _missing(name: str) -> ApiError:
    return invalid("input", f"{name} is required")
