"""What every client asks for: a tool and a form, and whether an answer obeys them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

MESSAGES = [{"role": "user", "content": "roll the dice"}]

DICE = {
    "type": "object",
    "properties": {"sides": {"enum": [6, 20]}, "fair": {"type": "boolean"}},
    "required": ["sides", "fair"],
    "additionalProperties": False,
}
ROLL = {
    "type": "function",
    "function": {"name": "roll", "description": "Roll a die.", "parameters": DICE},
}
ROLL_NAMED = {"type": "function", "function": {"name": "roll"}}
DICE_FORM = {"type": "json_schema", "json_schema": {"name": "dice", "schema": DICE}}


def checked_dice(value: str | dict[str, Any]) -> dict[str, Any]:
    """Return the value, from JSON text if it is that; asserts that it obeys `DICE`."""
    dice = json.loads(value) if isinstance(value, str) else value
    jsonschema.validate(dice, DICE)
    return dict(dice)
