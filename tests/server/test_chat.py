from __future__ import annotations

import asyncio

import pytest

from miniinfer.sampling_params import RequestOutputKind

from .fake import CHAT_FRAME, FakeDelta, answer
from .sse_client import check_chat_chunks, read_events

URL = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hey"}], **fields}


async def refused(client, body, param, status=400, code=None):
    async with client.post(URL, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    return error


async def test_whole_answer(client, engine):
    engine.script = lambda ids, params: answer(params, ["Hel", "lo"], cached=4)
    async with client.post(URL, json=chat()) as response:
        body = await response.json()
        assert response.status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-model"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = 3 + CHAT_FRAME
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    [request] = engine.requests
    assert request.params.output_kind is RequestOutputKind.FINAL_ONLY
    assert request.stream.cancelled


async def test_v70_stream_order(client, engine):
    engine.script = lambda ids, params: answer(params, ["Hel", "lo"], stop_reason="END")
    async with client.post(URL, json=chat(stream=True)) as response:
        events = await read_events(response)
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
    assert check_chat_chunks(events) == {0: "Hello"}
    assert len(events) == 4
    assert all("usage" not in event for event in events)
    finish = events[-1]["choices"][0]
    assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", "END")
    assert engine.requests[0].params.output_kind is RequestOutputKind.DELTA


async def test_v71_several_choices_have_one_done_and_interleave(client, engine):
    body = chat(stream=True, n=3, stream_options={"include_usage": True})
    async with client.post(URL, json=body) as response:
        events = await read_events(response)
    assert check_chat_chunks(events, choices=3) == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert events[-1]["usage"]["prompt_tokens"] == 3 + CHAT_FRAME
    assert all(event["usage"] is None for event in events[:-1])


async def test_several_choices_whole_at_temperature_zero(client):
    async with client.post(URL, json=chat(n=3, temperature=0)) as response:
        body = await response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 15


async def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client.post(URL, json=chat(stream=True, stream_options=options)) as response:
        events = await read_events(response)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
async def test_v68_no_usage_unless_asked(client, options):
    async with client.post(URL, json=chat(stream=True, stream_options=options)) as response:
        events = await read_events(response)
    assert all(event["choices"] and "usage" not in event for event in events)


async def test_empty_deltas_send_no_chunk(client, engine):
    steps = [
        FakeDelta("", token_ids=[1], num_output_tokens=1),
        FakeDelta("a", token_ids=[2], num_output_tokens=2),
        FakeDelta("", finish_reason="length", num_output_tokens=3),
    ]
    engine.script = lambda ids, params: steps
    async with client.post(URL, json=chat(stream=True)) as response:
        events = await read_events(response)
    assert check_chat_chunks(events) == {0: "a"}
    assert len(events) == 3


async def test_an_answer_without_text_still_has_role_and_finish(client, engine):
    engine.script = lambda ids, params: [FakeDelta("", finish_reason="stop")]
    async with client.post(URL, json=chat(stream=True)) as response:
        events = await read_events(response)
    assert check_chat_chunks(events) == {0: ""}


async def test_unicode_and_line_breaks_survive(client, engine):
    text = 'a\r\nb\u2028\u0085"\\\x00😀'
    engine.script = lambda ids, params: answer(params, list(text))
    async with client.post(URL, json=chat(stream=True)) as response:
        events = await read_events(response)
    assert check_chat_chunks(events) == {0: text}


async def test_logprobs(client, engine):
    body = chat(logprobs=True, top_logprobs=2)
    async with client.post(URL, json=body) as response:
        whole = (await response.json())["choices"][0]["logprobs"]["content"]
    async with client.post(URL, json={**body, "stream": True}) as response:
        events = await read_events(response)
    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole
    assert "".join(entry["token"] for entry in whole) == "Hello"
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == b"Hello"
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in whole)


async def test_minus_infinity_is_written_as_a_number(client, engine):
    def script(ids, params):
        steps = answer(params, ["a"], logprobs=True)
        object.__setattr__(steps[0].logprobs[0], "logprob", float("-inf"))
        return steps

    engine.script = script
    async with client.post(URL, json=chat(logprobs=True)) as response:
        body = await response.json()
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [123],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": 5, "content": "hi"}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["text"]}],
    ],
)
async def test_bad_messages(client, engine, messages):
    async with client.post(URL, json={"messages": messages}) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert error["param"] == "messages"
    assert not engine.requests


async def test_missing_messages(client):
    await refused(client, {}, "messages")


async def test_conversation_reaches_the_template(client, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be"}]},
        {"role": "user", "content": "a\r\nb", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "B"},
    ]
    async with client.post(URL, json={"messages": messages, "max_tokens": 1}) as response:
        assert response.status == 200, await response.text()
    [(seen, options)] = engine.tokenizer.chats
    assert seen == messages
    assert options["add_generation_prompt"] is True
    assert options["continue_final_message"] is False


async def test_template_options(start, engine):
    client = await start(
        engine, default_chat_template_kwargs={"enable_thinking": False, "a": 1}, chat_template="T"
    )
    body = chat(chat_template_kwargs={"a": 2}, continue_final_message=True, reasoning_effort="low")
    async with client.post(URL, json=body) as response:
        assert response.status == 200
    [(_, options)] = engine.tokenizer.chats
    assert options == {
        "enable_thinking": False,
        "a": 2,
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "T",
        "tools": None,
    }


async def test_request_template_when_trusted(start, engine):
    client = await start(engine, trust_request_chat_template=True)
    async with client.post(URL, json=chat(chat_template="R")) as response:
        assert response.status == 200
    assert engine.tokenizer.chats[0][1]["chat_template"] == "R"


async def test_template_error_is_a_400(client):
    body = {"messages": [{"role": "user", "content": "refuse"}]}
    error = await refused(client, body, "messages", code="chat_template_error")
    assert error["message"] == "the template refuses this"


async def test_long_conversation_is_tokenised_off_the_loop(client, engine):
    import threading

    engine.max_model_len = 10_000
    threads = []
    encode = engine.tokenizer.encode_rendered
    engine.tokenizer.encode_rendered = lambda *args, **options: (
        threads.append(threading.current_thread()),
        encode(*args, **options),
    )[1]
    for length in (10, 5000):
        body = {"messages": [{"role": "user", "content": "x" * length}]}
        async with client.post(URL, json=body) as response:
            assert response.status == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_v39_one_client_id_for_two_live_requests(client, engine):
    headers = {"X-Request-Id": "same"}
    responses = await asyncio.gather(
        *(client.post(URL, json=chat(request_id="same"), headers=headers) for _ in range(2))
    )
    bodies = [await response.json() for response in responses]
    assert all(response.headers["X-Request-Id"] == "same" for response in responses)
    assert len({body["id"] for body in bodies}) == 2
    assert all("same" in request.options["request_id"] for request in engine.requests)


@pytest.mark.parametrize("given", ["x" * 200, "a b", "ä", ""])
async def test_odd_client_ids_are_replaced(client, given):
    async with client.post(URL, json=chat(), headers={"X-Request-Id": given}) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] not in ("", given)
