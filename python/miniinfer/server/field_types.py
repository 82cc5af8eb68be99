"""Types of request fields with their ranges, as /openapi.json describes them.

Decoding checks the types alone: a refusal has to name the parameter, the limit and the value,
which is done where each value is used.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from miniinfer.chat_template import TEXT_PART_KEYS
from miniinfer.sampling_params import MAX_LOGPROBS

from .config import MAX_CHOICES, MAX_N

MAX_TEMPERATURE = 2.0
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FORM_TYPES = ("text", "json_object", "json_schema")
TOOL_CHOICES = ("none", "auto", "required")
TOOL_NAME = "[A-Za-z0-9_.-]{1,128}"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_INT32_MAX = 2**31 - 1

ChoiceCount: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_N})]
TokenLimit: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
TokenLimitOrZero: TypeAlias = Annotated[
    int, Meta(description="0 only with echo or prompt_logprobs", extra_json_schema={"minimum": 0})
]
TokenCount: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"minimum": 0, "maximum": _INT32_MAX})
]
TopK: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": -1, "maximum": _INT32_MAX})]
Alternatives: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS})
]
Seed: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})
]
Priority: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"minimum": -(2**31), "maximum": _INT32_MAX})
]
KeptTokens: TypeAlias = Annotated[
    int,
    Meta(
        description="-1 keeps as many as the context holds beside the answer",
        extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1}]},
    ),
]
TokenId: TypeAlias = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": _INT32_MAX})]
Temperature: TypeAlias = Annotated[
    float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TEMPERATURE})
]
TopP: TypeAlias = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
MinP: TypeAlias = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty: TypeAlias = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})]
NonEmpty: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
LogitBias: TypeAlias = Annotated[
    dict[str, float],
    Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
]
Role: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": ROLES})]
PartType: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": tuple(TEXT_PART_KEYS)})]
FormType: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": FORM_TYPES})]
FunctionType: TypeAlias = Annotated[str, Meta(extra_json_schema={"const": "function"})]
ToolName: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOOL_NAME}$"})]
ToolParameters: TypeAlias = Annotated[
    dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"const": "object"}}})
]
ToolChoiceName: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": TOOL_CHOICES})]
Effort: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": EFFORTS})]
Modality: TypeAlias = Annotated[str, Meta(extra_json_schema={"const": "text"})]
Refused: TypeAlias = Annotated[
    Any, Meta(description="known and not supported", extra_json_schema={"const": None})
]

NEUTRAL: tuple[Any, ...] = (None, False, [], "none")
"""What asks for nothing, whatever the parameter."""
Unoffered: TypeAlias = Annotated[
    Any,
    Meta(description="known and not supported", extra_json_schema={"enum": list(NEUTRAL)}),
]

_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
TokenIds: TypeAlias = Annotated[list[Any], Meta(extra_json_schema={"items": _TOKEN_ID})]
_TEXT = {"type": "string", "minLength": 1}
Prompts: TypeAlias = Annotated[
    Any,
    Meta(
        description="text, token ids, or a list of texts and lists of token ids",
        extra_json_schema={
            "anyOf": [
                _TEXT,
                _TOKEN_IDS,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_CHOICES,
                    "items": {"anyOf": [_TEXT, _TOKEN_IDS]},
                },
            ]
        },
    ),
]
