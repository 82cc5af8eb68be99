"""OpenAI's and Anthropic's own clients on the item APIs, over real engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from miniinfer import AsyncLLM

from .real import real_server, until_idle

MESSAGES = [{"role": "user", "content": "hi"}]
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "temperature": 0,
    "max_output_tokens": 12,
}
TO_ANTHROPIC: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}


@dataclass(frozen=True)
class Served:
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    llm: AsyncLLM


@contextlib.asynccontextmanager
async def serve(model: Path, **sizes: Any) -> AsyncIterator[Served]:
    async with (
        real_server(model, sizes) as (url, llm),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as of_anthropic,
    ):
        yield Served(of_openai, of_anthropic, llm)
        await until_idle(llm)


@pytest.fixture
async def served(tiny_model: Path) -> AsyncIterator[Served]:
    async with serve(tiny_model) as clients:
        yield clients


async def test_a_response_whole_and_streamed(served: Served) -> None:
    whole = await served.openai.responses.create(**RESPONSES)
    streamed = ""
    async for event in await served.openai.responses.create(**RESPONSES, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.delta
        last = event
    assert streamed == whole.output_text
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == streamed
    assert whole.usage is not None
    assert 1 <= whole.usage.output_tokens <= 12
    assert whole.usage.output_tokens == last.response.usage.output_tokens


async def test_the_logprobs_of_a_response_spell_its_text(served: Served) -> None:
    asked = RESPONSES | {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = await served.openai.responses.create(**asked)
    [part] = whole.output[0].content
    spelled = b"".join(bytes(entry.bytes) for entry in part.logprobs)
    assert spelled.decode(errors="replace") == whole.output_text
    assert all(len(entry.top_logprobs) == 3 for entry in part.logprobs)
    streamed: list[Any] = []
    async for event in await served.openai.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
    assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]


async def test_a_message_whole_and_streamed(served: Served) -> None:
    whole = await served.anthropic.messages.create(**TO_ANTHROPIC)
    async with served.anthropic.messages.stream(**TO_ANTHROPIC) as stream:
        streamed = await stream.get_final_message()
    assert text_of(streamed) == text_of(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert 1 <= whole.usage.output_tokens == streamed.usage.output_tokens <= 12
    count = await served.anthropic.messages.count_tokens(model="tiny", messages=MESSAGES)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens


async def test_a_message_ends_at_a_stop_sequence(served: Served) -> None:
    text = text_of(await served.anthropic.messages.create(**TO_ANTHROPIC))
    stop = next(each for each in text[1:] if each.isascii() and each.isprintable())
    cut = await served.anthropic.messages.create(**TO_ANTHROPIC, stop_sequences=[stop])
    assert text_of(cut) == text.partition(stop)[0]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


async def test_leaving_a_stream_frees_its_request(served: Served) -> None:
    stream = await served.openai.responses.create(
        **RESPONSES | {"max_output_tokens": 150}, stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until_idle(served.llm)
    messages = await served.anthropic.messages.create(
        **TO_ANTHROPIC | {"max_tokens": 150}, stream=True
    )
    async for event in messages:
        if event.type == "content_block_delta":
            break
    await messages.close()
    await until_idle(served.llm)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_the_built_in_model_says_the_same_on_every_route(builtin_gguf: Path) -> None:
    question = "What is the capital of France?"
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    sizes = {"max_model_len": 512, "block_size": 16, "served_model_name": "tiny"}
    async with serve(builtin_gguf, **sizes) as clients:
        chat = await clients.openai.chat.completions.create(
            model="tiny", messages=asked, temperature=0, max_tokens=24
        )
        said = chat.choices[0].message.content
        assert "Paris" in said
        response = await clients.openai.responses.create(
            **RESPONSES | {"max_output_tokens": 24, "input": question}, instructions="Be brief."
        )
        assert response.output_text == said
        message = await clients.anthropic.messages.create(
            **TO_ANTHROPIC | {"max_tokens": 24, "messages": asked[1:]}, system="Be brief."
        )
        assert text_of(message) == said
        follow_up = "And of Spain?"
        response = await clients.openai.responses.create(
            **RESPONSES | {"max_output_tokens": 24, "input": follow_up},
            instructions="Be brief.",
            previous_response_id=response.id,
        )
        turns = [
            asked[1],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": follow_up},
        ]
        message = await clients.anthropic.messages.create(
            **TO_ANTHROPIC | {"max_tokens": 24, "messages": turns}, system="Be brief."
        )
        assert text_of(message) == response.output_text
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens > 0
