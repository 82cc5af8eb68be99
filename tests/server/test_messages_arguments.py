"""A tool's input from JSON text, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniinfer.server.messages_arguments import tool_input

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\{}[],:', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text('ab"{', max_size=3), VALUES, max_size=3)


@given(OBJECTS)
def test_whole_text_is_what_it_says(value: dict[str, Any]) -> None:
    assert tool_input(json.dumps(value)) == value


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether a value is what is left of another when its text is cut."""
    if isinstance(part, dict) and isinstance(whole, dict):
        same = list(part) == list(whole)[: len(part)]
        return same and all(is_beginning(part[key], whole[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_beginning, part, whole))
    return part == whole


@given(OBJECTS, st.data())
def test_cut_text_is_a_beginning(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    assert is_beginning(tool_input(text[: data.draw(st.integers(0, len(text)))]), value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1', {}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": [1, 2]', {"a": [1, 2]}),
        ('{"a": {"b": {', {"a": {"b": {}}}),
        ('{"a,": "},', {}),
        ('{"a": "\\"}", "b": "c', {"a": '"}'}),
        ("[1]", {}),
        ("7", {}),
        ("null", {}),
        ("nonsense", {}),
        ("{oops}", {}),
        ("[" * 100_000, {}),
        ('{"a":' * 100_000, {}),
    ],
)
def test_cases(text: str, value: dict[str, Any]) -> None:
    assert tool_input(text) == value
