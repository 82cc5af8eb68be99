"""Bad values of every sampling parameter are refused by name; good ones come out in one form."""

import copy
import math
import pickle
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from miniinfer import sampling_params
from miniinfer.sampling_params import ParameterError, RequestOutputKind, SamplingParams

# Too long for CPython to print.
HUGE = 10**5000
NOT_INTEGERS = [True, False, 1.0, "1", [1], np.float32(1), b"1"]
NOT_NUMBERS = [True, False, "0.5", None, [0.5], 1j, math.nan, math.inf, -math.inf, 10**400, HUGE]

BAD_VALUES = {
    "n": [0, -1, None, 2**31, HUGE, *NOT_INTEGERS],
    "temperature": [-0.1, -1e-9, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.1, 1.0001, 2, *NOT_NUMBERS],
    "top_k": [-2, 2**31, None, *NOT_INTEGERS],
    "min_p": [-0.01, 1.01, *NOT_NUMBERS],
    "presence_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "frequency_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, *NOT_NUMBERS],
    "seed": [2**64, -(2**63) - 1, *NOT_INTEGERS],
    "max_tokens": [0, -1, 2**31, *NOT_INTEGERS],
    "min_tokens": [-1, 17, None, *NOT_INTEGERS],
    "stop": ["", ["END", ""], [1], 1, b"x", {"a": 1}, [None], "\ud800", True],
    "stop_token_ids": [[-1], [True], [1.5], ["1"], 1, "1", {1}, [2**31]],
    "include_stop_str_in_output": [1, 0, None, "true"],
    "ignore_eos": [1, 0, None, "true"],
    "skip_special_tokens": [1, 0, None, "true"],
    "logprobs": [-1, 21, *NOT_INTEGERS],
    "prompt_logprobs": [-1, 21, *NOT_INTEGERS],
    "logit_bias": [
        {"abc": 1},
        {"-1": 5},
        {-1: 5},
        {"": 1},
        {"5.0": 1},
        {"²": 1},
        {"9" * 5000: 1},
        {True: 1},
        {1.0: 1},
        {5: math.nan},
        {5: math.inf},
        {5: "1"},
        {5: True},
        {5: None},
        {5: 1, "5": 2},
        [5],
        "5",
    ],
    "allowed_token_ids": [[], [-1], [True], [1.5], ["1"], 1, "1", {1}, [2**31]],
    "bad_words": ["", "word", [""], [1], 1, [None], ["\ud800"], {"a": 1}],
    "structured_outputs": [1, "json", {"json": {}}, True],
    "output_kind": [0, 1, "DELTA", None],
}


@pytest.mark.parametrize(
    ("param", "value"),
    [(param, value) for param, values in BAD_VALUES.items() for value in values],
    ids=lambda value: "huge" if value is HUGE else ascii(value)[:30],
)
def test_bad_value_is_refused_by_name(param, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert str(caught.value) == caught.value.message
    assert caught.value.message.startswith(f"{param} must be ")
    assert len(caught.value.message) < 300


def test_every_parameter_has_bad_values():
    assert set(BAD_VALUES) == set(SamplingParams.__struct_fields__)


def test_message_names_the_limit_and_the_value():
    with pytest.raises(ParameterError, match=r"^logprobs must be at most 20; got 21$"):
        SamplingParams(logprobs=21)
    with pytest.raises(ValueError, match=r"^min_tokens must be at most max_tokens, 4; got 5$"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.0, 1.0, 16)
    assert (params.seed, params.logprobs, params.logit_bias) == (None, None, None)
    assert params.stop == []
    assert params.stop_token_ids == []
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_fields_are_keywords_only():
    with pytest.raises(TypeError):
        SamplingParams(1)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"top_k": -1}, 0),
        ({"temperature": 1e-5}, 0.0),
        ({"temperature": 1e-12}, 0.0),
        ({"temperature": 0}, 0.0),
        ({"temperature": 100}, 100.0),
        ({"temperature": Fraction(1, 2)}, 0.5),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"n": np.int64(3)}, 3),
        ({"seed": -1}, 2**64 - 1),
        ({"seed": -(2**63)}, 2**63),
        ({"seed": 2**64 - 1}, 2**64 - 1),
        ({"seed": 0}, 0),
        ({"max_tokens": None}, None),
        ({"logprobs": 0}, 0),
        ({"stop": "END"}, ["END"]),
        ({"stop": ("a", "b")}, ["a", "b"]),
        ({"stop": None}, []),
        ({"stop": []}, []),
        ({"stop_token_ids": (1, 2)}, [1, 2]),
        ({"stop_token_ids": None}, []),
        ({"logit_bias": {}}, {}),
        ({"logit_bias": {"5": 500, 6: -500, "007": 1}}, {5: 100.0, 6: -100.0, 7: 1.0}),
    ],
    ids=str,
)
def test_normal_form(given, stored):
    (name,) = given
    value = getattr(SamplingParams(**given), name)
    assert value == stored
    assert type(value) is type(stored)


def test_token_ids_are_checked_against_the_vocabulary():
    params = SamplingParams(logit_bias={"99": 1}, stop_token_ids=[7])
    assert params.for_vocab(100) is params
    with pytest.raises(ParameterError, match=r"vocabulary size 99; got 99") as caught:
        params.for_vocab(99)
    assert caught.value.param == "logit_bias"
    with pytest.raises(ParameterError, match=r"vocabulary size 7; got 7") as caught:
        SamplingParams(stop_token_ids=[7]).for_vocab(7)
    assert caught.value.param == "stop_token_ids"


def test_a_later_assignment_is_checked_with_the_vocabulary():
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ParameterError, match="top_p"):
        params.for_vocab(10)


def test_the_caller_keeps_its_own_objects():
    stop, bias = ["a"], {"5": 500}
    params = SamplingParams(stop=stop, logit_bias=bias)
    params.stop.append("b")
    params.logit_bias[6] = 1.0
    assert stop == ["a"]
    assert bias == {"5": 500}


def test_copies_and_messages_are_equal():
    params = SamplingParams(
        temperature=0.7,
        seed=-3,
        stop=["x"],
        logit_bias={"5": 1},
        output_kind=RequestOutputKind.DELTA,
    )
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_a_message_with_a_bad_value_is_refused():
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.json.decode(b'{"top_p": 7}', type=SamplingParams)


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ParameterError("n", "n must be 1")))
    assert (error.param, str(error)) == ("n", "n must be 1")


def test_stop_strings_have_a_limit_together():
    limit = sampling_params.MAX_STOP_BYTES
    for stop in ("x" * limit, ["é" * (limit // 4)] * 2):
        assert SamplingParams(stop=stop).stop
    for stop in ("x" * (limit + 1), ["é" * (limit // 4)] * 3, [str(i) for i in range(limit)]):
        with pytest.raises(ParameterError, match=f"stop must be at most {limit} bytes") as caught:
            SamplingParams(stop=stop)
        assert caught.value.param == "stop"


def test_a_stop_token_named_often_counts_once():
    assert SamplingParams(stop_token_ids=[3, 1, 3, 1, 1]).stop_token_ids == [3, 1]
