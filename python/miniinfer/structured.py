"""What form an answer is to have: JSON, a schema of it, an expression, choices, a grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .parameters import ParameterError, boolean, refuse, strings, text, token_ids

__all__ = ["CompiledGrammar", "StructuredOutputsParams", "closed"]

_PARAM = "structured_outputs"
_FORMS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of an answer: exactly one of the first five fields. Names and meanings follow vLLM.

    Construction checks the fields and raises `ParameterError`. What the form says is looked at when
    it is compiled.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as JSON text or as a dict; a keyword that cannot be obeyed is refused."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: list[str] | None = None
    """The texts to choose from."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, with `start` for the whole."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """No white space between the tokens of JSON; else a little of it."""
    disable_additional_properties: bool = False
    """Objects of the schema have no properties but those it names, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON."""
    after_token_ids: list[int] | None = None
    """The form begins once these ids were generated one after the other, as for the end of
    reasoning; at once if there are none."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field; `ParameterError` says what is wrong."""
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            message = f"{_PARAM} must have exactly one of {', '.join(_FORMS)}; got {named}"
            raise ParameterError(_PARAM, message)
        if self.json_object is not None:
            boolean(f"{_PARAM}.json_object", self.json_object)
        if self.json is not None and not isinstance(self.json, str | dict):
            refuse(f"{_PARAM}.json", "a JSON schema as a string or a dict", self.json)
        if self.choice is not None:
            self.choice = strings(f"{_PARAM}.choice", self.choice)
            if not self.choice:
                refuse(f"{_PARAM}.choice", "a list of at least one string", self.choice)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                text(f"{_PARAM}.{name}", value)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            boolean(f"{_PARAM}.{name}", getattr(self, name))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            limit = "left out with disable_any_whitespace"
            refuse(f"{_PARAM}.whitespace_pattern", limit, self.whitespace_pattern)
        if self.after_token_ids is not None:
            token_ids(f"{_PARAM}.after_token_ids", self.after_token_ids)

    def compiled(self, handle: Any) -> CompiledGrammar:
        """This form with the grammar that an engine made of it."""
        fields = {name: getattr(self, name) for name in StructuredOutputsParams.__struct_fields__}
        return CompiledGrammar(**fields, handle=handle)

    def source(self) -> tuple[str, list[str]]:
        """The form as the core takes it: its kind and its texts."""
        if self.json is not None:
            return "json_schema", [self._schema_text(self.json)]
        if self.regex is not None:
            return "regex", [self.regex]
        if self.choice is not None:
            return "choice", self.choice
        if self.grammar is not None:
            return "lark", [self.grammar]
        return "json_object", []

    def _schema_text(self, schema: str | dict[str, Any]) -> str:
        name = f"{_PARAM}.json"
        if isinstance(schema, str):
            text(name, schema)
            if not self.disable_additional_properties:
                return schema
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            if self.disable_additional_properties:
                value = closed(value)
            return text(name, json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ParameterError):
                raise
            message = f"{name} must be a JSON schema: {error}"
            raise ParameterError(name, message) from None


class CompiledGrammar(StructuredOutputsParams, kw_only=True):
    """A form that an engine has compiled: what it was, and the grammar it became.

    It stands wherever a `StructuredOutputsParams` does, for any number of requests to the engine
    that compiled it, and costs them nothing.
    """

    handle: Any
    """The core's grammar."""


# What in a schema maps names to schemas, and what holds values that are none.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects with `properties` have no others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            copy[key] = {name: closed(inner) for name, inner in value.items()}
        else:
            copy[key] = value if key in _VALUES else closed(value)
    if "properties" in copy:
        copy.setdefault("additionalProperties", False)
    return copy
