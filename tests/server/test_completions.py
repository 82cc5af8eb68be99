from __future__ import annotations

import itertools

import pytest

from .fake import VOCAB_SIZE, FakeDelta, FakeLogprob, answer
from .sse_client import read_events

URL = "/v1/completions"


async def complete(client, **fields):
    async with client.post(URL, json=fields) as response:
        body = await response.json()
        assert response.status == 200, body
    return body


async def refused(client, param, **fields):
    async with client.post(URL, json=fields) as response:
        body = await response.json()
        assert response.status == 400, body
    assert body["error"]["param"] == param, body
    return body["error"]


def texts_of(events):
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_whole_answer(client, engine):
    body = await complete(client, prompt="abc")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert engine.requests[0].params.max_tokens == 16
    assert engine.requests[0].token_ids == list(b"abc")


async def test_stream(client):
    body = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
    async with client.post(URL, json=body) as response:
        events = await read_events(response)
    assert texts_of(events) == {0: "Hello"}
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons == [None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
        (["ab", [99]], [b"ab", b"c"]),
        ([[97]], [b"a"]),
    ],
)
async def test_prompt_forms(client, engine, prompt, expected):
    body = await complete(client, prompt=prompt)
    assert [request.token_ids for request in engine.requests] == [list(e) for e in expected]
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        ["a", []],
        [-1],
        [VOCAB_SIZE],
        [1.5],
        [True],
        [None],
        [[1, 2], [3, -4]],
        [1, "a"],
        [[1], 2],
        [[["a"]]],
        [{"a": 1}],
        {"a": 1},
        5,
        [10**30],
        ["x"] * 1025,
    ],
)
async def test_v56_v57_bad_prompts(client, engine, prompt):
    await refused(client, "prompt", prompt=prompt)
    assert not engine.requests
    await complete(client, prompt="the next request works")


async def test_v56_empty_prompt_is_one_bos_where_the_tokenizer_adds_one(client, engine):
    engine.tokenizer.adds_bos = True
    await complete(client, prompt="")
    assert engine.requests[0].token_ids == [256]


async def test_prompts_times_choices(client, engine):
    engine.script = lambda ids, params: [
        delta
        for index in range(params.n)
        for delta in [
            FakeDelta(f"{bytes(ids).decode()}{index}", index=index, num_output_tokens=2),
            FakeDelta("", index=index, finish_reason="length", num_output_tokens=2),
        ]
    ]
    expected = {0: "a0", 1: "a1", 2: "b0", 3: "b1", 4: "c0", 5: "c1"}
    body = await complete(client, prompt=["a", "b", "c"], n=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert texts_of([body]) == expected
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == 3
    async with client.post(URL, json={"prompt": ["a", "b", "c"], "n": 2, "stream": True}) as r:
        assert texts_of(await read_events(r)) == expected
    assert all(request.stream.cancelled for request in engine.requests)


async def test_too_many_choices(client, engine):
    error = await refused(client, "n", prompt=["a"] * 1000, n=2)
    assert "1024" in error["message"]
    assert "2000" in error["message"]
    assert not engine.requests


async def test_default_max_tokens_is_cut_to_what_is_left(client, engine):
    await complete(client, prompt="x" * 60)
    assert engine.requests[0].params.max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 62}, "max_tokens"),
        ({"prompt": "x" * 64}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1, "echo": True, "max_tokens": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"echo": 1}, "echo"),
        ({"stop": ""}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 0, "echo": True, "max_tokens": 0}, "n"),
    ],
)
async def test_bad_parameters(client, engine, fields, param):
    error = await refused(client, param, **{"prompt": "abc", **fields})
    assert param in error["message"]
    assert not engine.requests


async def test_v52_best_of_equal_to_n_is_accepted(client):
    body = await complete(client, prompt="a", n=2, best_of=2)
    assert len(body["choices"]) == 2


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
async def test_echo(client, prompt):
    body = await complete(client, prompt=prompt, echo=True)
    assert body["choices"][0]["text"] == "abcHello"
    async with client.post(URL, json={"prompt": prompt, "echo": True, "stream": True}) as r:
        assert texts_of(await read_events(r)) == {0: "abcHello"}


async def test_echo_of_one_token(client):
    body = await complete(client, prompt=[97], echo=True)
    assert body["choices"][0]["text"] == "aHello"


async def test_each_prompt_has_its_own_limit(client, engine):
    await complete(client, prompt=["x" * 60, "y", "z" * 60])
    assert [request.params.max_tokens for request in engine.requests] == [4, 16, 4]


async def test_echo_of_several_prompts(client):
    body = await complete(client, prompt=["a", [98]], n=2, echo=True)
    assert texts_of([body]) == {0: "aHello", 1: "aHello", 2: "bHello", 3: "bHello"}


async def test_echo_alone_generates_nothing(client, engine):
    body = await complete(client, prompt=["ab", "c"], n=2, echo=True, max_tokens=0)
    assert texts_of([body]) == {0: "ab", 1: "ab", 2: "c", 3: "c"}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == 3
    fields = {"prompt": "ab", "echo": True, "max_tokens": 0, "stream": True}
    async with client.post(URL, json=fields) as response:
        assert texts_of(await read_events(response)) == {0: "ab"}
    assert not engine.requests


@pytest.mark.parametrize(
    ("echo", "stream", "logprobs"),
    list(itertools.product([False, True], [False, True], [None, 0, 1, False])),
)
async def test_v55_no_combination_of_echo_stream_and_logprobs_crashes(
    client, echo, stream, logprobs
):
    fields = {"prompt": "a", "echo": echo, "stream": stream, "logprobs": logprobs}
    async with client.post(URL, json=fields) as response:
        assert response.status in (200, 400)
        text = await response.text()
    if logprobs is None:
        assert response.status == 200
        assert '"logprobs":null' in text


async def test_logprobs(client, engine):
    body = await complete(client, prompt="a", logprobs=2)
    whole = body["choices"][0]["logprobs"]
    assert whole["tokens"] == list("Hello")
    assert whole["text_offset"] == [0, 1, 2, 3, 4]
    assert whole["token_logprobs"] == [-0.5] * 5
    assert [len(top) for top in whole["top_logprobs"]] == [2] * 5
    async with client.post(URL, json={"prompt": "a", "logprobs": 2, "stream": True}) as response:
        events = await read_events(response)
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert {key: [item for part in parts for item in part[key]] for key in whole} == whole


async def test_logprobs_zero_names_the_chosen_token(client):
    body = await complete(client, prompt="a", logprobs=0)
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.5}


async def test_logprobs_of_a_character_cut_into_tokens(client, engine):
    raw = "é€".encode()
    entries = [FakeLogprob(byte, "\ufffd", bytes([byte]), -0.1) for byte in raw]
    engine.script = lambda ids, params: [
        FakeDelta("é€", logprobs=entries, finish_reason="length", num_output_tokens=5)
    ]
    logprobs = (await complete(client, prompt="a", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"bytes:\\x{byte:02x}" for byte in raw]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1]


async def test_refusal_by_the_engine_leaves_nothing_running(client, engine):
    def script(ids, params):
        if ids == [98]:
            # As the core's RequestError.
            error = ValueError("this request can never run")
            error.param = "max_tokens"
            raise error
        return answer(params, ["x"])

    engine.script = script
    async with client.post(URL, json={"prompt": ["a", "b", "c"], "stream": True}) as response:
        body = await response.json()
        assert response.status == 400
    assert body["error"]["message"] == "this request can never run"
    assert body["error"]["param"] == "max_tokens"
    assert [request.stream.cancelled for request in engine.requests] == [True]
