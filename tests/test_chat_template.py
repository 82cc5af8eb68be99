"""Chat templates: against transformers on real models' templates, and what messages become."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from miniinfer.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate, ChatTemplateError
from miniinfer.tokenizer import Tokenizer

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2]}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <b> & é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = {
    "one": [user("Hi  ")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi")],
    "several": [user("a"), assistant("b"), user("c\r\nd")],
    "reasoning in content": [user("a"), assistant("<think>\nx\n</think>\n\nb"), user("c")],
    "reasoning apart": [user("a"), assistant("b", reasoning_content="because"), user("c")],
    "empty answer": [user("a"), assistant(""), user("b")],
    "tool": [
        user("weather?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
    ],
    "tool, then text": [
        user("weather?"),
        assistant("Let me look.", tool_calls=[CALL, CALL]),
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
        {"role": "tool", "tool_call_id": "call_1", "content": "13 °C"},
        assistant("Mild."),
        user("Thanks <|im_end|> {{ 1 }}"),
    ],
    "wrong order": [assistant("a"), assistant("b")],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"enable_thinking": False},
    {"add_generation_prompt": False},
]
WITH_TEMPLATES = ["llama3_1", "qwen3", "gemma3", "deepseek_v3"]


@pytest.fixture(scope="module", params=WITH_TEMPLATES)
def pair(request: pytest.FixtureRequest, real_tokenizers: dict[str, Path]) -> tuple[Any, Tokenizer]:
    """transformers' tokenizer and ours."""
    from transformers import AutoTokenizer

    directory = real_tokenizers[request.param]
    return AutoTokenizer.from_pretrained(str(directory)), Tokenizer.from_directory(directory)


def test_real_templates_render_as_transformers_renders_them(pair: tuple[Any, Tokenizer]) -> None:
    from jinja2 import TemplateError

    reference, tokenizer = pair
    rendered = 0
    for name, conversation in CONVERSATIONS.items():
        for options in OPTIONS:
            arguments = {"add_generation_prompt": True, **options}
            before = copy.deepcopy(conversation)
            try:
                expected = reference.apply_chat_template(conversation, tokenize=False, **arguments)
            except TemplateError as error:
                with pytest.raises(ChatTemplateError, match=re.escape(str(error))):
                    tokenizer.apply_chat_template(conversation, **arguments)
                continue
            except TypeError:
                # A template that adds the arguments to a string; ours gets the JSON text.
                text = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
                assert text in tokenizer.apply_chat_template(conversation, **arguments)
                continue
            rendered += 1
            assert tokenizer.apply_chat_template(conversation, **arguments) == expected, name
            ids = reference.apply_chat_template(conversation, return_dict=False, **arguments)
            assert tokenizer.encode_chat(conversation, **arguments) == ids, name
            assert conversation == before
    assert rendered >= 20


def test_real_templates_continue_the_final_message(pair: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = pair
    for text in ("The answer", "The answer ", "a\n\n", " b"):
        conversation = [user("a"), assistant(text)]
        assert tokenizer.apply_chat_template(
            conversation, add_generation_prompt=False, continue_final_message=True
        ) == reference.apply_chat_template(
            conversation, tokenize=False, continue_final_message=True
        )


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}<{{ p.type }}:{{ p.text }}>{% endfor %}"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}={{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(body) %}{% for p in body %}<{{ p.text }}>{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
ASSIGNED = (
    "{% for m in messages %}{% set c = m.content %}{% for p in c[0:] | list %}<{{ p.text }}>"
    "{% endfor %}{% endfor %}"
)


def render(source: str, *messages: Any, **options: Any) -> str:
    return ChatTemplate(source).render(list(messages), **{"add_generation_prompt": False} | options)


def arguments_of(arguments: Any) -> str:
    message = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    return render(PLAIN, message)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', '{"x": 1}'),
        ({"x": "é<"}, '{"x": "é<"}'),
        ("", "{}"),
        ("  ", "{}"),
        ("null", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_become_an_object(arguments: Any, expected: str) -> None:
    assert arguments_of(arguments) == f"[assistant]({expected})"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("not json", "is not valid JSON: Expecting value"),
        ('{"x": ', "is not valid JSON"),
        ("[" * 200_000, "is not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        ("3", "must be a JSON object, not int"),
        (["x"], "must be a JSON object, not list"),
    ],
)
def test_arguments_that_are_no_object(arguments: Any, problem: str) -> None:
    where = r"messages\[0\]\.tool_calls\[0\]\.function\.arguments "
    with pytest.raises(ChatTemplateError, match=where + problem):
        arguments_of(arguments)


def test_arguments_as_text_for_templates_that_add_them() -> None:
    source = (
        "{% for c in messages[0].tool_calls %}{{ 'a' + c['function']['arguments'] }}{% endfor %}"
    )
    for arguments in ('{"x":"é"}', {"x": "é"}):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert render(source, assistant("", tool_calls=[call])) == 'a{"x": "é"}'


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (PLAIN, "a", "[user]a"),
        (PLAIN, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "[user]a\nb"),
        (PLAIN, [{"type": "input_text", "text": "a"}, "b"], "[user]a\nb"),
        (PLAIN, [{"type": "refusal", "refusal": "no"}], "[user]no"),
        (PLAIN, [], "[user]"),
        (PLAIN, "", "[user]"),
        (PARTS, "a", "<text:a>"),
        (PARTS, [{"type": "output_text", "text": "a"}], "<text:a>"),
        (EITHER, "a", "=a"),
        (EITHER, [{"type": "text", "text": "a"}], "<a>"),
        (MACRO, "a", "<a>"),
        (ASSIGNED, ["a", "b"], "<a><b>"),
    ],
)
def test_content_takes_the_form_the_template_wants(
    source: str, content: Any, expected: str
) -> None:
    assert render(source, user(content)) == expected


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("m.content is none", "none"),
        ("m['content'] == none", "none"),
        ("not m.content", "none"),
        ("m.content is not string", "text"),
    ],
)
def test_null_content(test: str, expected: str) -> None:
    source = "{% for m in messages %}{{ 'none' if " + test + " else 'text' }}{% endfor %}"
    assert render(source, assistant(None, tool_calls=[CALL])) == expected
    assert render(source, {"role": "assistant"}) == expected


def test_null_keys_are_absent() -> None:
    source = "{{ messages[0].tool_calls is defined }}{{ messages[0].content }}"
    assert render(source, assistant(None, tool_calls=None)) == "False"


def test_reasoning_is_found_under_its_names() -> None:
    source = "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert render(source, assistant("", **{key: "r"})) == "rr"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list of messages, not str"),
        ({"role": "user"}, "must be a list of messages, not dict"),
        (None, "must be a list of messages, not NoneType"),
        (["hi"], r"messages\[0\] must be an object, not str"),
        ([{"content": "a"}], r"messages\[0\]\.role must be a non-empty string, not None"),
        ([user("a"), {"role": 3}], r"messages\[1\]\.role must be"),
        ([user(5)], r"messages\[0\]\.content must be a string, a list of parts or null, not int"),
        ([user({"type": "text"})], r"content must be a string, a list of parts or null, not dict"),
        ([user([5])], r"content\[0\] must be an object, not int"),
        ([user([{"type": "image_url"}])], r"content\[0\]\.type is 'image_url': only text parts"),
        ([user([{"type": ["text"]}])], r"content\[0\]\.type is \['text'\]"),
        ([user([{"type": "text"}])], r"content\[0\]\.text must be a string, not NoneType"),
        ([assistant("", tool_calls={})], r"tool_calls must be a list, not dict"),
        ([assistant("", tool_calls=[{}])], r"tool_calls\[0\]\.function must be an object"),
        ([user(object())], r"messages\[0\] holds a object, which is not a JSON value"),
        ([{"role": "user", 1: 2}], r"messages\[0\] has a key that is not a string: 1"),
    ],
)
def test_malformed_messages(messages: Any, problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        ChatTemplate(PLAIN).render(messages)


def test_deep_nesting_is_an_error() -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="nested more than 128 levels"):
        render(PLAIN, user("a"), tools=nested)


def test_message_objects_of_client_libraries() -> None:
    class Message:
        def model_dump(self, **_: Any) -> dict[str, Any]:
            return {"role": "user", "content": "a"}

    assert render(PLAIN, Message()) == "[user]a"


def test_line_ends_of_the_template_file_do_not_matter(tmp_path: Path) -> None:
    body = "  {% if true %}\n{{ m.content }}\nend\n{% endif %}\n"
    source = "{% for m in messages %}\n" + body + "{% endfor %}\n"
    expected = "a\r\nb\nend\n"
    for line_end in ("\n", "\r\n"):
        (tmp_path / "t.jinja").write_bytes(source.replace("\n", line_end).encode())
        text = (tmp_path / "t.jinja").read_bytes().decode()
        assert render(text, user("a\r\nb")) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1"),
        ("{% for i in [1, 2] %}{% continue %}{{ i }}{% endfor %}", ""),
        ("{{ tools }}{{ documents }}", "NoneNone"),
        ("{{ add_generation_prompt }}", "False"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    ],
)
def test_dialect(source: str, expected: str) -> None:
    assert render(source, user("a")) == expected


def test_functions_and_variables() -> None:
    assert render("{{ strftime_now('%Y') }}", user("a")) == str(datetime.now().year)
    assert render("{{ flag }}", user("a"), flag=True) == "True"
    assert render("{{ documents[0].text }}", user("a"), documents=[{"text": "t"}]) == "t"


def test_variables_cannot_replace_the_conversation() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be called 'messages'"):
        ChatTemplate(PLAIN).render([user("a")], messages=[user("b")])


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ messages | tojson(indent='x' * 3, separators=1) }}", "not subscriptable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{% include 'file' %}", "no loader"),
    ],
)
def test_failures_carry_the_reason(source: str, problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        render(source, user("a"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{",
        "{% if x %}",
        "{{ x | no_such_filter }}",
        "{% endfor %}",
        "(" + "{{ (" * 2000,
    ],
)
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ messages | map(attribute='__class__') | first | string | length }}{{ x.y.z }}",
    ],
)
def test_hostile_templates_are_held_in_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source, user("a"))


def test_unsafe_attributes_print_nothing() -> None:
    assert render("{{ raise_exception.__globals__ }}", user("a")) == ""
    assert render("{{ '{0.__class__}'.format(messages) }}", user("a")) == ""


def test_what_a_template_writes_is_bounded() -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=str(MAX_RENDERED_CHARACTERS)):
        render(source, user("x" * 100))


def test_continue_final_message() -> None:
    options = {"continue_final_message": True}
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert render(source, user("a"), assistant("b "), **options) == "[a][b "
    trimmed = source.replace("m.content", "m.content | trim")
    assert render(trimmed, user("a"), assistant("b "), **options) == "[a][b"
    assert render(PARTS, user("a"), assistant("b"), **options) == "<text:a><text:b"
    assert render(source, user("a"), assistant(""), **options) == "[a]["
    with pytest.raises(ChatTemplateError, match="does not print the last message"):
        render("{{ messages[0].content }}", user("a"), assistant("b"), **options)
    with pytest.raises(ChatTemplateError, match="cannot both be true"):
        render(source, user("a"), add_generation_prompt=True, **options)
    with pytest.raises(ChatTemplateError, match="needs text in the last message"):
        render(PARTS, user("a"), assistant([]), **options)


def test_templates_are_compiled_once() -> None:
    assert ChatTemplate.of(PLAIN) is ChatTemplate.of(PLAIN)
