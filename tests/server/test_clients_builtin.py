"""The built-in model over HTTP: forced calls and forms, sampled as freely as clients do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from .clients.asks import DICE_FORM, ROLL, ROLL_NAMED, checked_dice
from .real import real_server, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEEDS = range(4)
SIZES = {"max_model_len": 256, "block_size": 16, "max_num_seqs": 16}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(builtin_gguf: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        real_server(builtin_gguf, SIZES) as (url, llm),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
        await until_idle(llm)


async def message_of(client: openai.AsyncOpenAI, *, stream: bool, **asked: Any) -> Any:
    """Return the answer's message, added up by the client if streamed."""
    asked |= {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Roll a die with twenty sides."}],
        "temperature": 1,
        "max_tokens": 100,
    }
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0].message
    async with client.chat.completions.stream(**asked) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0].message


async def pairs(client: openai.AsyncOpenAI, **asked: Any) -> list[tuple[Any, Any]]:
    """Return the whole and the streamed message for each seed, all asked for at once."""
    asks = [(seed, stream) for seed in SEEDS for stream in (False, True)]
    found = await asyncio.gather(
        *(message_of(client, stream=stream, seed=seed, **asked) for seed, stream in asks)
    )
    return list(zip(found[::2], found[1::2], strict=True))


async def test_forced_calls_are_valid_and_streamed_as_they_are_whole(
    client: openai.AsyncOpenAI,
) -> None:
    for whole, streamed in await pairs(client, tools=[ROLL], tool_choice=ROLL_NAMED):
        [call] = whole.tool_calls
        assert call.function.name == "roll"
        checked_dice(call.function.arguments)
        [same] = streamed.tool_calls
        assert same.function.name == "roll"
        assert same.function.arguments == call.function.arguments
        assert not whole.content
        assert not streamed.content


async def test_answers_of_a_schema_are_valid_and_streamed_as_they_are_whole(
    client: openai.AsyncOpenAI,
) -> None:
    messages = await pairs(client, response_format=DICE_FORM)
    for whole, streamed in messages:
        checked_dice(whole.content)
        assert streamed.content == whole.content
    # Drawn, not greedy.
    assert len({whole.content for whole, _ in messages}) > 1
