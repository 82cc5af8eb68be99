"""Answers of a given form, allowed ids and bad words: what comes, and what is refused."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from engines import check_idle, greedy, make_llm
from miniinfer import (
    LLM,
    AsyncLLM,
    CompiledGrammar,
    EngineArgs,
    ParameterError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from miniinfer.structured import closed

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    """What `PERSON` says, in Python."""
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        and re.fullmatch("[A-Z][a-z]{1,6}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value.get("tags", [])) <= 2
        and set(value.get("tags", [])) <= {"a", "b"}
    )


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    check_idle(shared.llm_engine.engine.core)


def form(**fields: Any) -> SamplingParams:
    """Parameters for one form, drawn at temperature 1 and long enough for it."""
    return SamplingParams(
        temperature=1, seed=7, max_tokens=100, structured_outputs=StructuredOutputsParams(**fields)
    )


def answers(llm: LLM, params: SamplingParams, prompts: int = 1) -> list[Any]:
    outputs = llm.generate(["Who?"] * prompts, params, use_tqdm=False)
    return [choice for output in outputs for choice in output.outputs]


def refusal(fields: dict[str, Any]) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(**fields)
    assert len(caught.value.message) < 300
    return caught.value


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"choice": ["yes", "no", "yes, sir"]}, r"yes|no|yes, sir"),
        ({"regex": r"[0-9]{3}-(a|é){2}"}, r"[0-9]{3}-(a|é){2}"),
        ({"grammar": 'start: "x" pair+\npair: "(" pair? ")"'}, r"x(\(*\)*)+"),
        ({"json": {"type": "boolean"}}, r"true|false"),
        ({"json": '{"const": {"a": [1, null]}}'}, r"\{\s*\"a\"\s*:\s*\[\s*1\s*,\s*null\s*\]\s*\}"),
    ],
)
def test_an_answer_has_the_form_and_ends_by_itself(llm, fields, pattern):
    params = form(**fields)
    params.n = 4
    for choice in answers(llm, params):
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"
        assert choice.token_ids[-1] != tiny.EOS or choice.text


def test_json_without_white_space(llm):
    for choice in answers(llm, form(json=PERSON, disable_any_whitespace=True), 8):
        assert is_person(json.loads(choice.text)), choice.text
        assert not re.search(r"\s", choice.text)


def test_white_space_of_ones_own(llm):
    params = form(json={"enum": [[1, 2]]}, whitespace_pattern="_")
    params.n = 8
    for choice in answers(llm, params):
        assert choice.text.replace("_", "") == "[1,2]"


def test_a_cut_answer_says_length(llm):
    params = form(json={"type": "string", "minLength": 50})
    params.max_tokens = 5
    (choice,) = answers(llm, params)
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 5)


def test_rows_without_a_form_get_the_tokens_they_get_alone(llm):
    free = [greedy(20), SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)]
    alone = [llm.generate("A text", params, use_tqdm=False)[0].outputs[0] for params in free]
    bound = [form(json=PERSON), form(choice=["a", "b"])]
    mixed = llm.generate(
        ["A text", "B", "A text", "C"], [free[0], bound[0], free[1], bound[1]], use_tqdm=False
    )
    got = [output.outputs[0].token_ids for output in mixed]
    assert got[0] == alone[0].token_ids
    assert got[2] == alone[1].token_ids
    assert is_person(json.loads(mixed[1].outputs[0].text))


def test_a_form_does_not_depend_on_the_batch(llm, tiny_model):
    (alone,) = answers(llm, form(json=PERSON))
    tight = make_llm(tiny_model, num_kv_blocks=40, max_num_batched_tokens=16)
    for choice in answers(tight, form(json=PERSON), 12):
        assert choice.token_ids == alone.token_ids
    check_idle(tight.llm_engine.engine.core)


def test_logprobs_are_the_models_own(llm):
    params = form(choice=["zz"])
    params.logprobs = 2
    (choice,) = answers(llm, params)
    plain = llm.generate("Who?", greedy(1, logprobs=2), use_tqdm=False)[0].outputs[0]
    best = {token: entry.logprob for token, entry in plain.logprobs[0].items()}
    assert best.items() <= {t: e.logprob for t, e in choice.logprobs[0].items()}.items()


def test_a_form_begins_after_the_ids_it_waits_for(llm):
    free = llm.generate("Who?", greedy(12), use_tqdm=False)[0].outputs[0]
    mark = free.token_ids[3:5]
    params = greedy(40)
    params.structured_outputs = StructuredOutputsParams(choice=["done"], after_token_ids=mark)
    (choice,) = answers(llm, params)
    cut = next(at for at in range(12) if free.token_ids[at : at + 2] == mark) + 2
    assert choice.token_ids[:cut] == free.token_ids[:cut]
    assert choice.text.endswith("done")
    assert choice.finish_reason == "stop"


def test_v75_what_cannot_be_used_is_refused_and_running_requests_go_on(llm):
    engine = llm.llm_engine
    name = engine.add_request(None, "A text", greedy(20))
    engine.step()
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    bottomless: dict[str, Any] = {}
    bottomless["items"] = bottomless
    for fields, words in [
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
        ({"json": deep}, "recursion"),
        ({"json": bottomless}, "JSON schema"),
        ({"json": "{"}, "no JSON"),
        ({"json": {"const": float("nan")}}, "JSON schema"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a" * 300_000}, "262144"),
        ({"grammar": "root ::= 'a'"}, "Lark"),
        ({"grammar": "start: " + "(" * 10_000}, "200"),
    ]:
        with pytest.raises(ParameterError) as caught:
            engine.add_request(None, "A text", form(**fields))
        assert caught.value.param.startswith("structured_outputs")
        assert "structured_outputs" in caught.value.message
        assert words in caught.value.message
        assert len(caught.value.message) < 500
    # What is large but sound may be used.
    big = engine.add_request(None, "A text", form(regex="(a{1,1000}){1,1000}"))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert set(outputs[big].text) == {"a"}
    assert len(outputs[name].token_ids) == 20


def test_v76_numbers_and_blanks_come_to_an_end_and_keywords_are_obeyed_or_refused(llm):
    encode = llm.llm_engine.tokenizer.encode
    for liked, longest in (("0123456789", 24), (" \t\n", 34)):
        params = form(json={"type": "array", "items": {"type": "number"}, "maxItems": 2})
        params.logit_bias = {encode(character)[0]: 100.0 for character in liked}
        for choice in answers(llm, params, 4):
            assert max(map(len, re.findall(r"\d+|\s+", choice.text)), default=0) <= longest
    for schema in ({"not": {}}, {"type": "array", "uniqueItems": True}, {"if": {}, "then": {}}):
        with pytest.raises(ParameterError, match="Unimplemented"):
            answers(llm, form(json=schema))
    for choice in answers(llm, form(json={"patternProperties": {"^x$": {"type": "null"}}}), 4):
        if choice.finish_reason == "stop":
            value = json.loads(choice.text)
            assert not isinstance(value, dict) or value.get("x") is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"json_object": True, "choice": ["a"]},
        {"json": 3},
        {"json": ["a"]},
        {"json_object": 1},
        {"regex": 1},
        {"regex": "\ud800"},
        {"grammar": b"start: a"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["a", ""]},
        {"choice": [1]},
        {"json": {}, "disable_any_whitespace": 1},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"json": {}, "whitespace_pattern": 1},
        {"json": {}, "after_token_ids": [-1]},
        {"json": {}, "after_token_ids": "ab"},
    ],
    ids=ascii,
)
def test_v77_what_is_no_form_is_refused_by_name(fields):
    error = refusal(fields)
    assert error.param.startswith("structured_outputs")
    assert error.message.startswith("structured_outputs")


def test_allowed_ids_and_forms_exclude_each_other():
    with pytest.raises(ParameterError, match="allowed_token_ids must be left out"):
        SamplingParams(
            allowed_token_ids=[1], structured_outputs=StructuredOutputsParams(json_object=True)
        )


def test_objects_are_closed_where_schemas_are_and_nowhere_else():
    schema = {
        "properties": {"properties": {"type": "null"}, "x": {"properties": {}}},
        "anyOf": [{"properties": {}}, {"properties": {}, "additionalProperties": True}],
        "$defs": {"properties": {"items": {"properties": {}}}},
        "default": {"properties": {}},
    }
    assert closed(schema) == {
        "properties": {
            "properties": {"type": "null"},
            "x": {"properties": {}, "additionalProperties": False},
        },
        "anyOf": [
            {"properties": {}, "additionalProperties": False},
            {"properties": {}, "additionalProperties": True},
        ],
        "$defs": {"properties": {"items": {"properties": {}, "additionalProperties": False}}},
        "default": {"properties": {}},
        "additionalProperties": False,
    }


def test_no_other_properties_if_so_asked(llm):
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    params = form(json=schema, disable_additional_properties=True, disable_any_whitespace=True)
    params.n = 8
    assert {choice.text for choice in answers(llm, params)} <= {"{}", '{"a":1}'}


def test_only_allowed_ids_are_generated(llm):
    params = SamplingParams(temperature=1, seed=1, max_tokens=30, allowed_token_ids=[65, 66])
    (choice,) = answers(llm, params)
    assert len(choice.token_ids) == 30
    assert set(choice.token_ids) == {65, 66}
    with pytest.raises(RequestError, match=r"allowed_token_ids must be token ids below .* 260"):
        answers(llm, SamplingParams(allowed_token_ids=[260]))
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[260]).for_vocab(260)


def test_bad_words_are_not_generated(llm):
    tokenizer = llm.llm_engine.tokenizer
    ids = [tokenizer.encode(letter)[0] for letter in "ab "]
    params = SamplingParams(temperature=1, seed=5, max_tokens=100, allowed_token_ids=ids)
    (choice,) = answers(llm, params)
    assert "aab" in choice.text
    assert "b a" in choice.text
    params.bad_words = ["aab", "b a"]
    (choice,) = answers(llm, params)
    assert "aab" not in choice.text
    assert "b a" not in choice.text
    # Without a mask too, and for greedy rows.
    plain = llm.generate("Who?", greedy(30), use_tqdm=False)[0].outputs[0]
    word = tokenizer.decode(plain.token_ids[5:8])
    banned = llm.generate("Who?", greedy(30, bad_words=[word]), use_tqdm=False)[0].outputs[0]
    if tokenizer.encode(word) == plain.token_ids[5:8]:
        assert word not in banned.text
    assert banned.token_ids[:5] == plain.token_ids[:5]


async def test_compiled_off_the_loop_and_used_by_many(tiny_model):
    sizes = {"num_kv_blocks": 256, "block_size": 4, "max_model_len": 128}
    async with AsyncLLM(EngineArgs(model=str(tiny_model), **sizes)) as llm:
        found: list[CompiledGrammar] = []
        params = StructuredOutputsParams(choice=["left", "right"])
        thread = threading.Thread(target=lambda: found.append(llm.compile_structured(params)))
        thread.start()
        thread.join()
        sampling = SamplingParams(temperature=1, structured_outputs=found[0])
        for _ in range(3):
            async for output in llm.generate("Where?", sampling):
                last = output.outputs[0]
            assert last.text in ("left", "right")
            assert last.finish_reason == "stop"
        with pytest.raises(ParameterError, match="objct"):
            llm.compile_structured(StructuredOutputsParams(json={"type": "objct"}))


def test_a_grammar_is_for_the_engine_that_compiled_it(llm, tiny_model):
    other = make_llm(tiny_model)
    grammar = other.llm_engine.engine.compile_grammar(StructuredOutputsParams(json_object=True))
    with pytest.raises(RequestError, match="structured_outputs must be a grammar that this engine"):
        answers(llm, SamplingParams(structured_outputs=grammar))


def test_a_hundred_of_a_hundred_answers_obey_the_schema(builtin_gguf):
    llm = LLM(str(builtin_gguf), max_model_len=128, max_num_seqs=100, num_kv_blocks=1000, seed=11)
    # Short, for the real model takes its time.
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 1, "maximum": 120},
            "ok": {"enum": [1]},
        },
        "required": ["age"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        n=100,
        temperature=1,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    values = [json.loads(choice.text) for choice in answers(llm, params)]
    assert len(values) == 100
    for value in values:
        assert {"age"} <= set(value) <= {"age", "ok"}
        assert type(value["age"]) is int
        assert 1 <= value["age"] <= 120
        assert value.get("ok", 1) == 1
