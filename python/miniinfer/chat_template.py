"""Render chat templates: the Jinja programs that turn a list of messages into one prompt string.

The dialect is the one that model repositories are written for (see "Chat templates" in the
documentation of transformers): Jinja 3 with `trim_blocks`, `lstrip_blocks`, `break`/`continue`, the
functions `raise_exception` and `strftime_now`, a `tojson` filter that escapes no HTML, and a
`{% generation %}` tag that only marks a region.

A template comes with the model and is not trusted. It runs in Jinja's immutable sandbox and sees
nothing but plain JSON values, so it can reach no attribute of the interpreter; what it writes is
bounded by `MAX_RENDERED_CHARACTERS`. One thing cannot be bounded from inside the process: a
template may loop for a very long time. Load models from people you trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

    from .template_usage import TemplateUsage

MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024
"""Longest prompt, in characters, that a template may write."""

TEXT_PART_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Content part types that hold text, and the key each holds it under."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# A private-use character: no template writes it, and `strip` does not remove it.
_CUT = "\ue0f7\ue0f8"


class ChatTemplateError(ValueError):
    """The messages cannot be rendered: no template, a bad message, or the template refused."""


class ChatTemplate:
    """One compiled template.

    Compiling takes milliseconds; `ChatTemplate.of` keeps the compiled form of recent sources.
    Rendering is thread-safe.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        from jinja2 import TemplateError

        environment = _environment()
        try:
            self._syntax = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" at line {line}" if line else ""
            raise ChatTemplateError(f"the chat template does not compile{where}: {error}") from None

    @staticmethod
    @lru_cache(maxsize=32)
    def of(source: str) -> ChatTemplate:
        """Return the compiled template for `source`, from the cache where possible."""
        return ChatTemplate(source)

    @cached_property
    def _usage(self) -> TemplateUsage:
        from .template_usage import TemplateUsage

        return TemplateUsage(self._syntax)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render `messages` (OpenAI chat format) to the prompt text.

        Message content may be a string or a list of text parts; the template gets whichever form
        it is written for, texts of a list being joined by line ends where it wants a string. The
        `arguments` of assistant tool calls may be a JSON string or an object.

        Args:
            messages: the conversation, at least one message.
            add_generation_prompt: end with the header of an assistant message.
            continue_final_message: end inside the last message, so that the model continues it.
            tools: tool definitions, as in the OpenAI API.
            documents: documents for retrieval templates, each with `title` and `text`.
            variables: further names for the template, such as `bos_token` or `enable_thinking`.

        Raises:
            ChatTemplateError: a message is malformed, or the template failed or refused.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message cannot both be true"
            )
        conversation = self._prepare(messages)
        if continue_final_message:
            _mark_end_of_last_message(conversation)
        text = self._run(
            {
                **_plain(variables, "chat template variables"),
                "messages": conversation,
                "tools": _plain(tools, "tools"),
                "documents": _plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_after_mark(text) if continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(
                        f"the chat template wrote more than {MAX_RENDERED_CHARACTERS} characters"
                    )
        except ChatTemplateError:
            raise
        except Exception as error:  # A template can raise whatever its expressions raise.
            reason = str(error) or type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {reason}") from error
        return "".join(pieces)

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            raise ChatTemplateError(
                f"messages must be a list of messages, not {type(messages).__name__}"
            )
        conversation = [
            self._prepare_message(_plain(message, f"messages[{index}]"), f"messages[{index}]")
            for index, message in enumerate(messages)
        ]
        if not conversation:
            raise ChatTemplateError("messages is empty: at least one message is needed")
        return conversation

    def _prepare_message(self, message: Any, name: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise ChatTemplateError(f"{name} must be an object, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f"{name}.role must be a non-empty string, not {role!r}")
        content = self._prepare_content(message.get("content"), f"{name}.content")
        # Templates crash on, or print, a null where they cope with an absent key.
        prepared = {key: value for key, value in message.items() if value is not None}
        prepared["content"] = content
        if "tool_calls" in prepared:
            prepared["tool_calls"] = self._prepare_tool_calls(
                prepared["tool_calls"], f"{name}.tool_calls"
            )
        reasoning = next((prepared[key] for key in _REASONING_KEYS if key in prepared), None)
        if reasoning is not None:
            # Templates read it under either name.
            prepared["reasoning_content"] = reasoning
            prepared.setdefault("thinking", reasoning)
        return prepared

    def _prepare_content(self, content: Any, name: str) -> Any:
        usage = self._usage
        if content is None:
            return None if usage.tests_content_for_none else ""
        if isinstance(content, str):
            if usage.loops_over_content and not usage.tests_content_for_string:
                return [{"type": "text", "text": content}]
            return content
        if not isinstance(content, list):
            raise ChatTemplateError(
                f"{name} must be a string, a list of parts or null, not {type(content).__name__}"
            )
        texts = [_part_text(part, f"{name}[{index}]") for index, part in enumerate(content)]
        if usage.loops_over_content:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _prepare_tool_calls(self, calls: Any, name: str) -> list[Any]:
        if not isinstance(calls, list):
            raise ChatTemplateError(f"{name} must be a list, not {type(calls).__name__}")
        prepared = []
        for index, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise ChatTemplateError(f"{name}[{index}].function must be an object")
            arguments = _arguments_object(
                function.get("arguments"), f"{name}[{index}].function.arguments"
            )
            value: Any = arguments
            if self._usage.concatenates_arguments:
                value = json.dumps(arguments, ensure_ascii=False)
            prepared.append({**call, "function": {**function, "arguments": value}})
        return prepared


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ChatTemplateError(f"{name} must be an object, not {type(part).__name__}")
    kind = part.get("type", "text")
    key = TEXT_PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise ChatTemplateError(
            f"{name}.type is {kind!r}: only text parts are supported ({', '.join(TEXT_PART_KEYS)})"
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise ChatTemplateError(f"{name}.{key} must be a string, not {type(text).__name__}")
    return text


def _arguments_object(arguments: Any, name: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"{name} is not valid JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ChatTemplateError(f"{name} must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _mark_end_of_last_message(conversation: list[dict[str, Any]]) -> None:
    """Append the cut mark, then a space that tells later whether the template strips content."""
    last = conversation[-1]
    content = last["content"]
    if isinstance(content, list) and content:
        content[-1]["text"] += _CUT + " "
    elif isinstance(content, str):
        last["content"] = content + _CUT + " "
    else:
        raise ChatTemplateError(
            "continue_final_message needs text in the last message, and it has none"
        )


def _cut_after_mark(text: str) -> str:
    at = text.rfind(_CUT)
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not print the last message's content"
        )
    kept = text[:at]
    # Where the template strips content, it would have stripped the end of this one too.
    stripped = not text.startswith(_CUT + " ", at)
    return kept.rstrip() if stripped else kept


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Copy `value`, checking that it is JSON all through: templates get no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 128:
        raise ChatTemplateError(f"{name} is nested more than 128 levels deep")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ChatTemplateError(f"{name} has a key that is not a string: {key!r}")
        return {str.__str__(key): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, depth + 1) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):
        # A message object of the OpenAI client.
        return _plain(dump(exclude_none=True), name, depth + 1)
    raise ChatTemplateError(f"{name} holds a {type(value).__name__}, which is not a JSON value")


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    # Jinja takes 50 ms to import, and completions never need it.
    import jinja2
    import jinja2.ext
    from jinja2 import nodes, sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks training targets: here only a scope."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(str(message))


def _strftime_now(format_string: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format_string)
