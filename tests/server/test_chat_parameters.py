"""The parameters of a chat: what is refused, what is accepted, and what reaches the engine."""

from __future__ import annotations

import pytest

from .fake import CHAT_FRAME, VOCAB_SIZE
from .sse_client import read_events
from .test_chat import TOOL, chat, refused

URL = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "rest"),
        ({"max_tokens": None}, "rest"),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 9}, 9),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 64 - 3 - CHAT_FRAME}, 64 - 3 - CHAT_FRAME),
    ],
)
async def test_v64_max_tokens(client, engine, fields, expected):
    async with client.post(URL, json=chat(**fields)) as response:
        assert response.status == 200
    rest = engine.max_model_len - 3 - CHAT_FRAME
    assert engine.requests[0].params.max_tokens == (rest if expected == "rest" else expected)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, "5", True, 2.5, 59])
async def test_v64_bad_max_tokens(client, engine, name, value):
    error = await refused(client, chat(**{name: value}), name)
    if value == 59:
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in ("64", "65", "59", "6 in the prompt"))
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_v63_prompt_longer_than_the_context_is_an_http_error(client, engine, stream):
    body = {"messages": [{"role": "user", "content": "x" * 61}], "stream": stream}
    error = await refused(client, body, "messages", code="context_length_exceeded")
    assert "64" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**65}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["END", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"allowed_token_ids": "x"}, "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"echo": "yes"}, "echo"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": "a"}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"service_tier": 1}, "service_tier"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"web_search_options": {"user_location": None}}, "web_search_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"functions": 0}, "functions"),
        ({"guided_json": ""}, "guided_json"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_bad_parameters(client, engine, fields, param):
    error = await refused(client, chat(**fields), param)
    assert param in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None},
        {"stop": []},
        {"n": None},
        {"foo": {"bar": [1]}},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": None},
        {"logit_bias": {"5": 100, "6": -100, "7": 500}},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": False},
        {"temperature": 2},
        {"temperature": 1e-12},
        {"seed": -1},
        {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"use_beam_search": False, "bad_words": []},
        {"functions": [], "function_call": "none", "guided_json": False},
        {"modalities": ["text"], "audio": None, "prediction": None},
        {"store": True, "service_tier": "flex"},
        {"truncate_prompt_tokens": 64},
    ],
)
async def test_accepted_parameters(client, fields):
    async with client.post(URL, json=chat(**fields)) as response:
        assert response.status == 200, await response.text()


async def test_parameters_reach_the_engine(client, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 11,
        "stop": "END",
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"5": 2},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
    }
    async with client.post(URL, json=chat(**fields, priority=3, cache_salt="s", user="u")) as r:
        assert r.status == 200
    [request] = engine.requests
    expected = {**fields, "stop": ["END"], "logit_bias": {5: 2.0}}
    assert {name: getattr(request.params, name) for name in fields} == expected
    assert request.options["priority"] == 3
    assert request.options["cache_salt"] == "s"
    assert request.options["tenant"] == "/u"


async def test_model_defaults_apply_where_the_request_is_silent(client, engine):
    engine.default_sampling_params = {"temperature": 0.3, "top_k": 20, "pad_token_id": 0}
    async with client.post(URL, json=chat(top_k=5)) as response:
        assert response.status == 200
    params = engine.requests[0].params
    assert (params.temperature, params.top_k) == (0.3, 5)


@pytest.mark.parametrize(
    ("keep", "limits", "length"),
    [
        (5, {}, 5),
        (5, {"max_tokens": 59}, 5),
        (-1, {}, 63),
        (-1, {"max_tokens": 4}, 60),
        (-1, {"max_tokens": 4, "max_completion_tokens": 63}, 1),
    ],
)
async def test_long_prompts_can_be_cut_at_their_start(client, engine, keep, limits, length):
    message = {"role": "user", "content": "x" * 100}
    body = {"messages": [message], "truncate_prompt_tokens": keep, **limits}
    async with client.post(URL, json=body) as response:
        assert response.status == 200
        assert (await response.json())["usage"]["prompt_tokens"] == length
    assert engine.requests[0].token_ids == [*b"x" * 100, 0, 0, 0][-length:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": None}, "messages"),
        ({"truncate_prompt_tokens": 64}, "messages"),
        ({"truncate_prompt_tokens": 60, "max_tokens": 5}, "max_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 64}, "max_tokens"),
    ],
)
async def test_a_prompt_that_leaves_no_room_is_refused(client, engine, fields, param):
    body = {"messages": [{"role": "user", "content": "x" * 100}], **fields}
    await refused(client, body, param, code="context_length_exceeded")
    assert not engine.requests


@pytest.mark.parametrize("url", [URL, "/v1/completions", "/generate"])
async def test_a_text_that_can_never_fit_is_not_tokenised(client, engine, url):
    text = "é" * 1000
    body = {"messages": [{"role": "user", "content": text}]} if url == URL else {"prompt": text}
    engine.tokenizer.longest_token = 10
    called = []
    engine.tokenizer.encode = engine.tokenizer.encode_rendered = called.append
    async with client.post(url, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if url == URL else "prompt")
    assert all(n in error["message"] for n in ("64 tokens", "--max-model-len", "at least 20"))
    assert not called


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"999999": 5}, None),
        ({"-1": 5}, None),
        ({"abc": 1}, None),
        ({"5": "x"}, None),
        ({"5": 500}, {5: 100.0}),
        ({"5": 100}, {5: 100.0}),
        ({"5": -100}, {5: -100.0}),
    ],
)
async def test_v49_logit_bias(client, engine, bias, expected):
    if expected is None:
        await refused(client, chat(logit_bias=bias), "logit_bias")
        return
    async with client.post(URL, json=chat(logit_bias=bias)) as response:
        assert response.status == 200
    assert engine.requests[0].params.logit_bias == expected


@pytest.mark.parametrize("stop", ["", ["END", ""], [1]])
async def test_v8_an_empty_stop_string(client, stop):
    await refused(client, chat(stop=stop), "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": "2"}, "n"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"foo": {"bar": 1}, "stream": True, "stream_options": {}}, None),
    ],
)
async def test_v67_odd_requests(client, fields, param):
    if param is not None:
        await refused(client, chat(**fields), param)
        return
    async with client.post(URL, json=chat(**fields)) as response:
        assert all("usage" not in event for event in await read_events(response))
