"""Completions that show their prompts: echoes, log probabilities and ids."""

from __future__ import annotations

import itertools

import pytest

from .fake import FakeDelta, FakeLogprob, answer
from .sse_client import read_events
from .test_completions import complete, refused, texts_of

URL = "/v1/completions"


def scores(ids):
    """What the engine says of a prompt: nothing of its first token."""
    return [None] + [
        FakeLogprob(i, chr(i), bytes([i]), -float(place), 2, [(65, "A", b"A", -0.25)])
        for place, i in enumerate(ids[1:], 1)
    ]


@pytest.fixture
def scored(engine):
    """An engine that scores prompts when it is asked to."""

    def script(ids, params):
        steps = answer(params, ["Hel", "lo"])
        if params.prompt_logprobs is not None:
            # As the engine does: with the first choice alone, and here after the others.
            steps[0].prompt_logprobs = scores(ids) if len(ids) > 1 else None
            steps[: params.n] = reversed(steps[: params.n])
        return steps

    engine.script = script
    return engine


async def both(client, **fields):
    """Return the whole choices, having compared them with the streamed ones."""
    whole = (await complete(client, **fields))["choices"]
    async with client.post(URL, json={**fields, "stream": True}) as response:
        events = await read_events(response)
    added: list[dict] = [{"index": i, "text": "", "logprobs": None} for i in range(len(whole))]
    for chunk in itertools.chain.from_iterable(event["choices"] for event in events):
        choice = added[chunk["index"]]
        choice["text"] += chunk["text"]
        if chunk["logprobs"] is not None:
            before = choice["logprobs"] or {key: [] for key in chunk["logprobs"]}
            choice["logprobs"] = {k: before[k] + v for k, v in chunk["logprobs"].items()}
        if "token_ids" in chunk:
            choice["token_ids"] = choice.get("token_ids", []) + chunk["token_ids"]
        for key in ("prompt_token_ids", "prompt_logprobs", "stop_reason"):
            if key in chunk:
                assert key not in choice
                choice[key] = chunk[key]
        choice["finish_reason"] = chunk["finish_reason"]
    assert added == whole
    return whole


@pytest.mark.parametrize("prompt", ["\n1. Ana", list(b"\n1. Ana")])
@pytest.mark.parametrize(("max_tokens", "generated"), [(0, ""), (3, "Hello")])
async def test_v53_echo_with_logprobs(client, scored, prompt, max_tokens, generated):
    [choice] = await both(client, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)
    text = "\n1. Ana" + generated
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    expected = [None, *(-float(i) for i in range(1, 7)), *([-0.5] * len(generated))]
    assert logprobs["token_logprobs"] == expected
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"A": -0.25, "1": -1.0}
    assert len(logprobs["top_logprobs"]) == len(text)
    assert choice["finish_reason"] == ("stop" if generated else "length")


async def test_scoring_alone_counts_no_answer(client, scored):
    fields = {"prompt": ["ab", "cde"], "echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    body = await complete(client, **fields)
    assert texts_of([body]) == {0: "ab", 1: "ab", 2: "cde", 3: "cde"}
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 5
    assert [request.params.max_tokens for request in scored.requests] == [1, 1]
    assert all(request.stream.cancelled for request in scored.requests)
    await both(client, **fields)


async def test_every_choice_begins_with_its_prompt(client, scored):
    fields = {"prompt": ["ab", "c"], "echo": True, "logprobs": 0, "prompt_logprobs": 0, "n": 3}
    choices = await both(client, **fields)
    assert len(choices) == 6
    for choice in choices[:3]:
        assert choice["logprobs"]["tokens"] == list("abHello")
        assert set(choice["prompt_logprobs"][1]) == {"98"}
    for choice in choices[3:]:
        assert choice["logprobs"]["token_logprobs"] == [None, *([-0.5] * 5)]
        assert choice["prompt_logprobs"] == [None]


async def test_bos_has_a_name_but_no_place_in_the_text(client, scored):
    scored.tokenizer.adds_bos = True
    decode = scored.tokenizer.decode
    scored.tokenizer.decode = lambda ids, skip=True: (
        "<s>" if list(ids) == [256] and not skip else decode(ids)
    )
    [choice] = await both(client, prompt="ab", echo=True, logprobs=0)
    assert choice["text"] == "abHello"
    assert choice["logprobs"]["tokens"] == ["<s>", *"abHello"]
    assert choice["logprobs"]["text_offset"] == [0, *range(7)]


async def test_prompt_logprobs_by_id(client, scored):
    [choice] = await both(client, prompt="ab", prompt_logprobs=1)
    assert choice["text"] == "Hello"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
    ]


async def test_each_format_has_as_many_alternatives_as_it_asked_for(client, scored):
    fields = {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 3}
    [choice] = await both(client, **fields)
    assert scored.requests[0].params.prompt_logprobs == 3
    assert scored.requests[0].params.logprobs == 0
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    assert len(choice["prompt_logprobs"][1]) == 2


async def test_prompt_logprobs_are_not_asked_for_without_need(client, scored):
    await both(client, prompt="ab", echo=True)
    await both(client, prompt="ab", logprobs=2)
    assert {request.params.prompt_logprobs for request in scored.requests} == {None}


async def test_token_ids(client, scored):
    choices = await both(client, prompt=["ab", [99]], n=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98]] * 2 + [[99]] * 2
    assert all(bytes(choice["token_ids"]) == b"Hello" for choice in choices)


async def test_a_prompt_cut_at_its_start(client, scored):
    [choice] = await both(
        client, prompt="abcdef", truncate_prompt_tokens=2, echo=True, return_token_ids=True
    )
    assert choice["text"] == "efHello"
    assert choice["prompt_token_ids"] == list(b"ef")
    for fields, length in (
        ({"truncate_prompt_tokens": 60}, 60),
        ({"truncate_prompt_tokens": -1}, 48),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, 60),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "echo": True}, 64),
    ):
        answer = await complete(client, prompt="x" * 100, **fields)
        assert answer["usage"]["prompt_tokens"] == length


async def test_zero_tokens_need_something_to_show(client, scored):
    error = await refused(client, "max_tokens", prompt="ab", max_tokens=0, logprobs=1)
    assert "at least 1" in error["message"]
    await both(client, prompt="ab", max_tokens=0, prompt_logprobs=0)


async def test_an_error_while_scoring_is_an_error(client, engine):
    engine.script = lambda ids, params: [
        FakeDelta("", finish_reason="error", error="the forward pass failed")
    ]
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
    async with client.post(URL, json=fields) as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "the forward pass failed"


async def test_generate_streams_ids_when_asked(client, scored):
    body = {"prompt": "ab", "stream": True, "return_token_ids": True}
    async with client.post("/generate", json=body) as response:
        events = await read_events(response)
    assert [i for event in events for i in event.get("token_ids", ())] == list(b"Hello")
    async with client.post("/generate", json={"prompt": "ab", "prompt_logprobs": 1}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "prompt_logprobs"
