"""The form that a request holds its answer to: response_format or structured_outputs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import msgspec

from miniinfer.sampling_params import StructuredOutputsParams

from .engine_api import Engine
from .errors import from_value_error, invalid
from .field_types import FORM_TYPES
from .protocol import GenerationRequest, ResponseFormat


def answer_form(body: GenerationRequest) -> tuple[StructuredOutputsParams | None, str]:
    """Return the form, or None for free text, and the parameter that asks for it.

    Raises `ApiError` 400 for one that is incomplete, and for two at once.
    """
    by_format = None
    if body.response_format is not None:
        by_format = _by_response_format(body.response_format)
    if body.structured_outputs is None:
        return by_format, "response_format"
    if by_format is not None:
        raise invalid(
            "structured_outputs", "structured_outputs and response_format cannot both be given"
        )
    try:
        given = {
            name: value
            for name, value in msgspec.structs.asdict(body.structured_outputs).items()
            if value is not None
        }
        return StructuredOutputsParams(**given), "structured_outputs"
    except ValueError as error:
        raise from_value_error(error, "structured_outputs") from error


def _by_response_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type not in FORM_TYPES:
        raise invalid(
            "response_format",
            f"response_format.type must be one of {list(FORM_TYPES)}, got {given.type!r}",
        )
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        raise invalid(
            "response_format",
            "response_format.json_schema.schema is required when the type is 'json_schema'",
            "missing_parameter",
        )
    try:
        return StructuredOutputsParams(json=schema)
    except ValueError as error:
        raise from_value_error(error, "response_format") from error


async def compile_form(
    engine: Engine, executor: Executor, form: StructuredOutputsParams | None, param: str
) -> None:
    """Make a form ready off the event loop, as that can take a second; raises `ApiError` 400."""
    if form is None:
        return
    try:
        await asyncio.get_running_loop().run_in_executor(executor, engine.compile_structured, form)
    except ValueError as error:
        raise from_value_error(error, param) from error
