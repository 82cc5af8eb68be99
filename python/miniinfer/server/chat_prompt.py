"""A conversation to token ids, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from miniinfer.chat_template import TEXT_PART_KEYS, ChatTemplateError

from .config import ServerConfig
from .engine_api import Tokenizer
from .errors import ApiError, invalid
from .field_types import ROLES
from .prompts import check_text, run_sized
from .protocol import ChatMessage, ContentPart

_RESERVED_KWARGS = frozenset(
    (
        "self",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "add_special_tokens",
    )
)

_CULPRITS = {
    "tools": "tools",
    "chat template variables": "chat_template_kwargs",
    "the chat template does not compile": "chat_template",
}
"""Parameters by how the reasons begin that `miniinfer.chat_template` gives."""


class Conversation(Protocol):
    """The fields of a body that shape a chat prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


async def tokenize_chat(
    messages: list[ChatMessage],
    options: Conversation,
    *,
    config: ServerConfig,
    tokenizer: Tokenizer,
    executor: Executor,
    tools: list[dict[str, Any]] | None = None,
    extra_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the ids of a conversation; raises `ApiError` 400 for one that cannot be rendered.

    With `max_tokens` a prompt that is clearly longer is refused before it is tokenised.
    """
    plain = plain_messages(messages)
    kwargs = _template_kwargs(options, config, extra_kwargs or {})
    continues = bool(options.continue_final_message)
    if continues and options.add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true",
        )
    generation_prompt = options.add_generation_prompt
    template = _template(options, config)

    def encode() -> list[int]:
        text = tokenizer.apply_chat_template(
            plain,
            tools=tools,
            add_generation_prompt=not continues if generation_prompt is None else generation_prompt,
            continue_final_message=continues,
            chat_template=template,
            **kwargs,
        )
        check_text(text, tokenizer, max_tokens, "messages")
        return tokenizer.encode_rendered(text)

    try:
        ids = await run_sized(executor, _characters(plain), encode)
    except ChatTemplateError as error:
        raise invalid(_culprit(str(error)), str(error), "chat_template_error") from error
    if not ids:
        raise invalid("messages", "the conversation renders to an empty prompt", "empty_prompt")
    return ids


def _culprit(reason: str) -> str:
    """Return the parameter that made rendering fail."""
    for beginning, param in _CULPRITS.items():
        if reason.startswith(beginning):
            return param
    return "messages"


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return validated messages as the dictionaries that templates read."""
    if not messages:
        raise invalid("messages", "messages must hold at least one message", "empty_prompt")
    for position, message in enumerate(messages):
        _check_message(message, f"messages[{position}]")
    return [_plain_message(message) for message in messages]


def _check_message(message: ChatMessage, name: str) -> None:
    if message.role not in ROLES:
        raise invalid("messages", f"{name}.role must be one of {list(ROLES)}, got {message.role!r}")
    calls = message.tool_calls or message.function_call or None
    if calls is not None and message.role != "assistant":
        raise invalid("messages", f"{name}.tool_calls is only for the assistant role")
    if message.content is None and not (message.role == "assistant" and calls):
        raise invalid("messages", f"{name}.content is required for the role {message.role!r}")
    if isinstance(message.content, list):
        if not message.content:
            raise invalid("messages", f"{name}.content must not be an empty list")
        for position, part in enumerate(message.content):
            _check_part(part, f"{name}.content[{position}]")


def _check_part(part: ContentPart, name: str) -> None:
    key = TEXT_PART_KEYS.get(part.type)
    if key is None:
        raise invalid(
            "messages", f"{name}.type must be one of {list(TEXT_PART_KEYS)}, got {part.type!r}"
        )
    if getattr(part, key) is UNSET:
        raise invalid("messages", f"{name}.{key} is required")


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    legacy = plain.pop("function_call", None)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
        if legacy is not None:
            plain["tool_calls"] = [{"type": "function", "function": legacy}]
    return plain


def _characters(messages: list[dict[str, Any]]) -> int:
    """Return about how much text a conversation holds; each message counts for its frame too."""
    total = 0
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            total += sum(len(text) for part in content for text in part.values())
        elif content is not None:
            total += len(content)
        for call in message.get("tool_calls", ()):
            total += len(str(call["function"]["arguments"]))
    return total + 32 * len(messages)


def _template_kwargs(
    options: Conversation, config: ServerConfig, extra: Mapping[str, Any]
) -> dict[str, Any]:
    kwargs = {**config.default_chat_template_kwargs, **extra}
    kwargs.update(options.chat_template_kwargs or {})
    reserved = sorted(_RESERVED_KWARGS.intersection(kwargs))
    if reserved:
        raise invalid(
            "chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(reserved)}"
        )
    return kwargs


def _template(options: Conversation, config: ServerConfig) -> str | None:
    if options.chat_template is None:
        return config.chat_template
    if not config.trust_request_chat_template:
        raise _untrusted_template()
    return options.chat_template


def _untrusted_template() -> ApiError:
    return invalid(
        "chat_template",
        "chat_template is not taken from requests by this server; "
        "start it with --trust-request-chat-template to allow them",
        "unsupported_parameter",
    )
