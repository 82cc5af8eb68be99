"""The form that a request holds its answer to: response_format or structured_outputs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from miniinfer.structured import CompiledGrammar, StructuredOutputsParams

from .engine_api import Engine
from .errors import from_value_error, invalid
from .field_types import FORM_TYPES
from .protocol import GenerationRequest, ResponseFormat


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A form and the parameter of the request that asks for it."""

    params: StructuredOutputsParams
    param: str

    def after(self, token_ids: list[int] | None) -> AnswerForm:
        """Return the form as one that begins once these ids were generated; None: at once."""
        return AnswerForm(
            msgspec.structs.replace(self.params, after_token_ids=token_ids), self.param
        )

    async def compiled(self, engine: Engine, executor: Executor) -> CompiledGrammar:
        """Make the form ready off the event loop, as that takes a while; raises `ApiError` 400."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, engine.compile_structured, self.params)
        except ValueError as error:
            raise from_value_error(error, self.param) from error


def answer_form(body: GenerationRequest) -> AnswerForm | None:
    """Return the form that a body asks for, None for free text.

    Raises `ApiError` 400 for one that is incomplete, and for two at once.
    """
    by_format = None
    if body.response_format is not None:
        by_format = _by_response_format(body.response_format)
    if body.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise invalid(
            "structured_outputs", "structured_outputs and response_format cannot both be given"
        )
    given = {
        name: value
        for name, value in msgspec.structs.asdict(body.structured_outputs).items()
        if value is not None
    }
    return _form("structured_outputs", **given)


def _by_response_format(given: ResponseFormat) -> AnswerForm | None:
    if given.type not in FORM_TYPES:
        raise invalid(
            "response_format",
            f"response_format.type must be one of {list(FORM_TYPES)}, got {given.type!r}",
        )
    if given.type == "text":
        return None
    if given.type == "json_object":
        return _form("response_format", json_object=True)
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        raise invalid(
            "response_format",
            "response_format.json_schema.schema is required when the type is 'json_schema'",
            "missing_parameter",
        )
    return _form("response_format", json=schema)


def _form(param: str, **fields: object) -> AnswerForm:
    try:
        return AnswerForm(msgspec.convert(fields, StructuredOutputsParams), param)
    except ValueError as error:
        raise from_value_error(error, param) from error
