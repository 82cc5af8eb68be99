"""OpenAI's own client against the server over a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from miniinfer import AsyncLLM

from .real import real_server, until_idle

MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
async def served(tiny_model: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, AsyncLLM]]:
    async with real_server(tiny_model) as (url, llm):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            yield client, llm
            await until_idle(llm)


Served = tuple[openai.AsyncOpenAI, AsyncLLM]


async def test_chat_whole_and_streamed(served: Served) -> None:
    client, _ = served
    whole = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert whole.object == "chat.completion"
    assert whole.model == "tiny"
    [choice] = whole.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    stream = await client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(delta.delta.content or "" for delta in deltas) == choice.message.content
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_the_clients_stream_helper(served: Served) -> None:
    client, _ = served
    whole = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    text = whole.choices[0].message.content or ""
    # The helper raises for an answer that its length cut.
    stop = next(each for each in text[1:] if each.isascii() and each.isprintable())
    async with client.chat.completions.stream(messages=MESSAGES, stop=stop, **GREEDY) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == text.partition(stop)[0]
    assert final.choices[0].finish_reason == "stop"


async def test_n_choices(served: Served) -> None:
    client, _ = served
    sampled = GREEDY | {"temperature": 1.0, "seed": 3, "n": 2}
    whole = await client.chat.completions.create(messages=MESSAGES, **sampled)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    streamed = ["", ""]
    async for chunk in await client.chat.completions.create(
        messages=MESSAGES, stream=True, **sampled
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


async def test_logprobs(served: Served) -> None:
    client, _ = served
    asked = GREEDY | {"logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(messages=MESSAGES, **asked)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert len(content) == 12
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert token.top_logprobs[0].bytes == token.bytes
    text = b"".join(bytes(token.bytes or []) for token in content).decode(errors="replace")
    assert text == whole.choices[0].message.content
    completion = await client.completions.create(prompt="ab", logprobs=2, **GREEDY)
    listed = completion.choices[0].logprobs
    assert listed is not None
    assert len(listed.tokens or []) == len(listed.token_logprobs or []) == 12


async def test_stop(served: Served) -> None:
    client, _ = served
    whole = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    text = whole.choices[0].message.content or ""
    stop = next(each for each in text[1:] if each.isascii() and each.isprintable())
    cut = await client.chat.completions.create(messages=MESSAGES, stop=[stop], **GREEDY)
    assert cut.choices[0].message.content == text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


async def test_completions(served: Served) -> None:
    client, _ = served
    whole = await client.completions.create(prompt=["ab", "cd"], **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1]
    ids = await client.completions.create(prompt=[64, 65], **GREEDY)
    assert ids.choices[0].finish_reason == "length"
    texts = ["", ""]
    async for chunk in await client.completions.create(prompt=["ab", "cd"], stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


async def test_models(served: Served) -> None:
    client, _ = served
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("changes", "param", "word"),
    [
        ({"temperature": -1}, "temperature", "-1"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": 10_000}, "max_tokens", "200"),
        ({"n": 0}, "n", "0"),
        ({"stop": ""}, "stop", "stop"),
        ({"logit_bias": {"999999": 5}}, "logit_bias", "999999"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"messages": []}, "messages", "message"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, None, "200"),
    ],
)
async def test_a_bad_request_names_its_parameter(
    served: Served, changes: dict[str, Any], param: str | None, word: str
) -> None:
    client, llm = served
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=word) as caught:
            await client.chat.completions.create(
                **({"messages": MESSAGES, "stream": stream} | GREEDY | changes)
            )
        assert param is None or caught.value.param == param
        assert caught.value.type == "invalid_request_error"
    assert llm.stats()["num_requests"] == 0


async def test_token_ids_beyond_the_vocabulary(served: Served) -> None:
    client, llm = served
    with pytest.raises(openai.BadRequestError, match="999") as caught:
        await client.completions.create(prompt=[1, 999], **GREEDY)
    assert caught.value.param == "prompt"
    assert llm.stats()["num_requests"] == 0


async def test_an_unknown_model(served: Served) -> None:
    client, _ = served
    with pytest.raises(openai.NotFoundError, match="gpt-4") as caught:
        await client.chat.completions.create(messages=MESSAGES, **(GREEDY | {"model": "gpt-4"}))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_leaving_a_stream_frees_its_request(served: Served) -> None:
    client, llm = served
    long = GREEDY | {"max_tokens": 150}
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **long)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    await until_idle(llm)
    assert llm.stats()["finished_abort"] == 1


async def test_many_at_once(served: Served) -> None:
    client, _ = served

    async def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"question {number}"}]
        if number % 2:
            whole = await client.chat.completions.create(messages=messages, **GREEDY)
            return whole.choices[0].message.content or ""
        stream = await client.chat.completions.create(messages=messages, stream=True, **GREEDY)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    alone = [await ask(number) for number in range(8)]
    assert await asyncio.gather(*(ask(number) for number in range(8))) == alone
    assert len(set(alone)) > 1
