from __future__ import annotations

import pytest

from .fake import EOS, FakeDelta, answer
from .sse_client import read_events

URL = "/generate"


async def test_whole_answer(client, engine):
    async with client.post(URL, json={"prompt": "abc", "max_tokens": 7}) as response:
        body = await response.json()
        assert response.status == 200
    usage = body.pop("usage")
    assert usage["completion_tokens"] == 5
    assert body.pop("request_id").startswith("gen-")
    assert body == {
        "text": "Hello",
        "token_ids": list(b"Hello"),
        "finished": True,
        "stop_reason": "eos",
    }
    assert engine.requests[0].params.max_tokens == 7


async def test_stream(client):
    body = {"prompt": [97], "stream": True, "request_id": "mine"}
    async with client.post(URL, json=body) as response:
        events = await read_events(response)
    request_id = events[0]["request_id"]
    assert request_id.startswith("gen-mine-")
    assert events == [
        {"request_id": request_id, "text": "Hel", "finished": False},
        {"request_id": request_id, "text": "lo", "finished": False},
        {"request_id": request_id, "text": "", "finished": True, "stop_reason": "eos"},
    ]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", None, "eos"),
        ("stop", EOS, "eos"),
        ("stop", 9, "stop"),
        ("stop", "END", "stop"),
        ("length", None, "max_tokens"),
        ("abort", None, "cancelled"),
        ("error", None, "error"),
    ],
)
async def test_stop_reasons(client, engine, finish_reason, stop_reason, expected):
    engine.script = lambda ids, params: [
        FakeDelta("a", num_output_tokens=1),
        FakeDelta("", finish_reason=finish_reason, stop_reason=stop_reason, num_output_tokens=2),
    ]
    body = {"prompt": "a", "stream": True, "stop_token_ids": [9]}
    async with client.post(URL, json=body) as response:
        events = await read_events(response)
    assert events[-1]["finished"] is True
    assert events[-1]["text"] == ""
    assert events[-1]["stop_reason"] == expected
    assert ("error" in events[-1]) == (finish_reason in ("abort", "error"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_bad_parameters(client, engine, fields, param):
    async with client.post(URL, json={"prompt": "a", **fields}) as response:
        body = await response.json()
        assert response.status == 400
    assert body["error"]["param"] == param
    assert not engine.requests


async def test_sampling_fields_reach_the_engine(client, engine):
    engine.script = lambda ids, params: answer(params, ["a"])
    body = {"prompt": "a", "temperature": 0, "top_k": 3, "seed": 5, "ignore_eos": True}
    async with client.post(URL, json=body) as response:
        assert response.status == 200
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.seed, params.ignore_eos) == (0, 3, 5, True)
