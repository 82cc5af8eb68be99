"""Faults that others' servers have had, asked of a real engine over HTTP.

The numbers in the names are those of the list of public reports that the tests are drawn from.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import aiohttp
import pytest

from engines import make_llm
from miniinfer import SamplingParams

from .real import real_server, until_idle
from .sse_client import parse_events

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Served:
    """A server over the tiny model, whose tokens are bytes, and what asks it."""

    def __init__(self, session, url, llm):
        self._session = session
        self._url = url
        self.tokenizer = llm.tokenizer
        # Greedy, of letters alone: what the model says is then plain text.
        letters = {self.tokenizer.token_to_id(chr(code)) for code in range(97, 123)}
        others = (i for i in range(self.tokenizer.vocab_size) if i not in letters)
        self.letters = {str(i): -100 for i in others}

    async def ask(self, path, status=200, **fields):
        async with self._session.post(self._url + path, json=fields) as response:
            body = await response.json()
            assert response.status == status, body
        return body

    async def stream(self, path, **fields):
        async with self._session.post(
            self._url + path, json={**fields, "stream": True}
        ) as response:
            assert response.status == 200, await response.text()
            *events, done = parse_events(await response.text())
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    async def both(self, **fields):
        """Return the text and the finish reason of a completion, whole and streamed alike."""
        fields = {"prompt": "hello", "temperature": 0, "logit_bias": self.letters, **fields}
        [choice] = (await self.ask(COMPLETIONS, **fields))["choices"]
        events = await self.stream(COMPLETIONS, **fields)
        chunks = [chunk for event in events for chunk in event["choices"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        return choice["text"], choice["finish_reason"]


@pytest.fixture
async def served(tiny_model: Path):
    async with (
        real_server(tiny_model, trust_request_chat_template=True) as (url, llm),
        aiohttp.ClientSession() as session,
    ):
        yield Served(session, url, llm)
        await until_idle(llm)


async def test_v1_a_character_cut_by_the_limit(served):
    form = {"structured_outputs": {"choice": ["Hi 😀"]}}
    assert await served.both(max_tokens=8, **form) == ("Hi 😀", "stop")
    for produced in (4, 5, 6):
        assert await served.both(max_tokens=produced, **form) == ("Hi \ufffd", "length")


async def test_v3_characters_of_several_tokens(served):
    text = "ďábel 日本 😀👩‍👧"
    fields = {"prompt": "a", "structured_outputs": {"choice": [text]}}
    assert await served.both(**fields, max_tokens=100) == (text, "stop")
    for event in await served.stream(COMPLETIONS, **fields, max_tokens=100):
        assert "\ufffd" not in event["choices"][0]["text"]


async def test_v6_a_stop_string_of_several_tokens(served):
    text, reason = await served.both(max_tokens=12)
    assert (len(text), reason) == (12, "length")
    stop = text[4:8]
    cut = text[: text.index(stop)]
    assert await served.both(max_tokens=12, stop=stop) == (cut, "stop")
    kept = await served.both(max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert kept == (cut + stop, "stop")
    # What looked like the beginning of a stop string is delivered once it is none.
    assert await served.both(max_tokens=12, stop=[stop + "!", text[11] + "?"]) == (text, "length")


async def test_v7_a_stop_string_before_min_tokens(served):
    text, _ = await served.both(max_tokens=12)
    early, reason = await served.both(max_tokens=12, stop=text[1], min_tokens=6)
    assert text.startswith(early)
    assert len(early) >= 5
    assert (reason == "stop") == (text[1] in text[5:])


@pytest.mark.parametrize("skip", [True, False])
async def test_v9_the_text_of_a_stop_token_stays_out(served, skip):
    token = served.tokenizer.token_to_id("<user>")
    fields = {
        "messages": MESSAGES,
        "logit_bias": {str(token): 100},
        "min_tokens": 3,
        "stop_token_ids": [token],
        "skip_special_tokens": skip,
    }
    body = await served.ask(CHAT, **fields)
    [choice] = body["choices"]
    assert "<user>" not in choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("fields", [{"temperature": 1e-5}, {"temperature": 1e-12}, {"top_p": 1e-4}])
async def test_v46_next_to_nothing_is_greedy(served, fields):
    greedy = await served.both(max_tokens=8)
    assert await served.both(max_tokens=8, **{"temperature": 1, "seed": 1, **fields}) == greedy


async def test_v47_a_penalty_does_not_depend_on_its_company(served):
    penalised = {"prompt": "aab", "temperature": 0, "repetition_penalty": 2, "max_tokens": 12}
    plain = {"prompt": "aab", "temperature": 0, "max_tokens": 5}
    alone = await served.ask(COMPLETIONS, **penalised)
    for order in ((penalised, plain), (plain, penalised)):
        bodies = await asyncio.gather(*(served.ask(COMPLETIONS, **body) for body in order))
        assert bodies[order.index(penalised)]["choices"] == alone["choices"]


async def test_v50_min_tokens_exactly(served):
    body = await served.ask(COMPLETIONS, prompt="a", min_tokens=4, logit_bias={"256": 100})
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_v52_several_greedy_choices(served):
    body = await served.ask(CHAT, messages=MESSAGES, n=3, temperature=0, max_tokens=6)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 1
    assert body["usage"]["completion_tokens"] == 18
    error = await served.ask(COMPLETIONS, 400, prompt="a", n=3, best_of=2)
    assert error["error"]["param"] == "best_of"


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_v53_echo_with_logprobs(served, max_tokens, n):
    prompt = "\n1. Ana"
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
    fields |= {"temperature": 0, "logit_bias": served.letters}
    body = await served.ask(COMPLETIONS, **fields)
    assert body["usage"]["completion_tokens"] == max_tokens * n
    for choice in body["choices"]:
        logprobs = choice["logprobs"]
        length = len(prompt) + max_tokens
        assert {len(values) for values in logprobs.values()} == {length}
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert choice["text"].startswith(prompt)
        assert logprobs["text_offset"] == list(range(length))
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    events = await served.stream(COMPLETIONS, **fields)
    for choice in body["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        streamed = [c["logprobs"]["token_logprobs"] for c in chunks if c["logprobs"]]
        assert list(itertools.chain(*streamed)) == choice["logprobs"]["token_logprobs"]
        assert "".join(c["text"] for c in chunks) == choice["text"]


@pytest.mark.parametrize("echo", [False, True])
async def test_v55_every_combination_of_logprobs(served, echo):
    for logprobs, prompt_logprobs in itertools.product([None, 0, 1], repeat=2):
        fields = {"prompt": "ab", "echo": echo, "max_tokens": 2}
        fields |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        [choice] = (await served.ask(COMPLETIONS, **fields))["choices"]
        assert (choice["logprobs"] is None) == (logprobs is None)
        assert ("prompt_logprobs" in choice) == (prompt_logprobs is not None)
        events = await served.stream(COMPLETIONS, **fields)
        shown = [c["logprobs"] for event in events for c in event["choices"]]
        assert any(shown) == (logprobs is not None)


async def test_a_prompt_of_one_token_has_nothing_before_it(served):
    [choice] = (await served.ask(COMPLETIONS, prompt="a", prompt_logprobs=1))["choices"]
    assert choice["prompt_logprobs"] == [None]


async def test_v58_the_prompt_of_a_chat_is_what_the_template_says(served):
    body = await served.ask("/tokenize", messages=MESSAGES)
    assert body["tokens"] == served.tokenizer.encode_chat(MESSAGES)
    answer = await served.ask(CHAT, messages=MESSAGES, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == body["tokens"]
    assert answer["usage"]["prompt_tokens"] == body["count"]


async def test_v58_exactly_one_bos_whoever_asks(tiny_model, tmp_path):
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"bos_token": "<pad>", "add_bos_token": True, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<eos>"}))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<pad>", chat_template=template
    )
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert expected.count(reference.bos_token_id) == 1
    async with (
        real_server(tmp_path) as (url, llm),
        aiohttp.ClientSession() as session,
    ):
        served = Served(session, url, llm)
        answer = await served.ask(CHAT, messages=MESSAGES, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == expected
        # A prompt that is no chat gets its own.
        answer = await served.ask(COMPLETIONS, prompt="hi", max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == [reference.bos_token_id, *expected[2:4]]
        await until_idle(llm)
    offline = make_llm(tmp_path)
    [output] = offline.chat(MESSAGES, SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"x":1}', '{"x": 1}'), ("", "{}"), ("null", "{}")]
)
async def test_v59_arguments_of_earlier_calls(served, arguments, shown):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ messages[1].tool_calls[0].function.arguments }}"
    fields = {"messages": messages, "chat_template": template}
    tokens = (await served.ask("/tokenize", **fields))["tokens"]
    assert served.tokenizer.decode(tokens) == shown
    await served.ask(CHAT, max_tokens=1, **fields)


async def test_v59_arguments_that_are_no_json(served):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = (await served.ask(CHAT, 400, messages=messages))["error"]
    assert error["param"] == "messages"
    assert "arguments" in error["message"]


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": nested(150)}}}]},
            "tools",
        ),
        ({"chat_template_kwargs": {"a": nested(150)}}, "chat_template_kwargs"),
        ({"chat_template": "{% if %}"}, "chat_template"),
        ({"chat_template": "{{ messages[5].role }}"}, "messages"),
    ],
)
async def test_what_cannot_be_rendered_is_named(served, fields, param):
    error = (await served.ask(CHAT, 400, messages=MESSAGES, **fields))["error"]
    assert (error["param"], error["code"]) == (param, "chat_template_error")


async def test_a_clients_own_message_objects(served):
    """Client libraries dump their messages with a null for each field that has no value."""
    nulls = dict.fromkeys(("name", "refusal", "audio", "function_call", "tool_calls"))
    messages = [
        {"role": "user", "content": "A", "name": None, "tool_call_id": None},
        {"role": "assistant", "content": "B", "reasoning": "r", "annotations": [], **nulls},
        {"role": "user", "content": [{"type": "text", "text": "C"}]},
    ]
    await served.ask(CHAT, messages=messages, max_tokens=1)


async def test_v60_an_empty_assistant_message(served):
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "B"},
    ]
    await served.ask(CHAT, messages=messages, max_tokens=1)


async def test_v61_without_a_chat_template(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    async with (
        real_server(tmp_path) as (url, llm),
        aiohttp.ClientSession() as session,
    ):
        served = Served(session, url, llm)
        error = (await served.ask(CHAT, 400, messages=MESSAGES))["error"]
        assert error["code"] == "chat_template_error"
        assert "no chat template" in error["message"]
        await served.ask(COMPLETIONS, prompt="a", max_tokens=1)
        await until_idle(llm)
