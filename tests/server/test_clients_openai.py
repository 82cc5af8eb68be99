"""OpenAI's own client on tools, forms and echo, over a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest
import pytest_asyncio

from .clients.asks import DICE_FORM, MESSAGES, ROLL, ROLL_NAMED, checked_dice
from .conftest import TinyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}


class Dice(pydantic.BaseModel):
    """The client makes a schema of this, and reads the answer back into it."""

    sides: Literal[6, 20]
    fair: bool
    marks: list[Literal["pip", "digit"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_server: TinyServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{tiny_server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("choice", "finish_reason"), [(ROLL_NAMED, "stop"), ("required", "tool_calls")]
)
async def test_forced_tool_calls(
    client: openai.AsyncOpenAI, choice: Any, finish_reason: str
) -> None:
    asked = GREEDY | {"tools": [ROLL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = await client.chat.completions.create(messages=MESSAGES, **asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "roll"
    checked_dice(call.function.arguments)
    assert whole.choices[0].finish_reason == finish_reason
    arguments, names, reasons = "", [], []
    async for chunk in await client.chat.completions.create(
        messages=MESSAGES, stream=True, **asked
    ):
        [each] = chunk.choices
        for delta in each.delta.tool_calls or []:
            assert delta.index == 0
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
        reasons.append(each.finish_reason)
    assert names == ["roll"]
    assert arguments == call.function.arguments
    assert reasons[-1] == finish_reason


async def test_tools_made_of_models_are_parsed(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Dice, name="roll")
    asked = GREEDY | {"tools": [tool], "tool_choice": ROLL_NAMED}
    whole = await client.chat.completions.parse(messages=MESSAGES, **asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Dice)
    async with client.chat.completions.stream(messages=MESSAGES, **asked) as stream:
        done = [event async for event in stream if event.type.startswith("tool_calls.function")]
    assert done[-1].type == "tool_calls.function.arguments.done"
    assert done[-1].parsed_arguments == call.function.parsed_arguments


async def test_answers_of_a_model_are_parsed(client: openai.AsyncOpenAI) -> None:
    asked = GREEDY | {"response_format": Dice}
    whole = await client.chat.completions.parse(messages=MESSAGES, **asked)
    assert isinstance(whole.choices[0].message.parsed, Dice)
    async with client.chat.completions.stream(messages=MESSAGES, **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_a_schema_and_its_logprobs(client: openai.AsyncOpenAI) -> None:
    asked = GREEDY | {"response_format": DICE_FORM, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(messages=MESSAGES, **asked)
    [choice] = whole.choices
    checked_dice(choice.message.content or "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = [token.token for token in choice.logprobs.content]
    streamed: list[str] = []
    async for chunk in await client.chat.completions.create(
        messages=MESSAGES, stream=True, **asked
    ):
        for each in chunk.choices:
            streamed += [t.token for t in (each.logprobs and each.logprobs.content) or []]
    assert streamed == spelled
    text = choice.message.content or ""
    # The token that ends the answer has an entry and no text.
    assert "".join(spelled).startswith(text)


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_whole_and_streamed(client: openai.AsyncOpenAI, max_tokens: int) -> None:
    asked = GREEDY | {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    asked |= {"prompt": "1. Ana", "extra_body": {"ignore_eos": True}}
    [whole] = (await client.completions.create(**asked)).choices
    assert whole.text.startswith("1. Ana")
    assert whole.logprobs is not None
    listed = whole.logprobs
    length = len("1. Ana") + max_tokens
    assert len(listed.tokens or []) == len(listed.token_logprobs or []) == length
    assert (listed.token_logprobs or [])[0] is None
    assert len(listed.text_offset or []) == length
    text, tokens = "", []
    async for chunk in await client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            text += choice.text
            tokens += (choice.logprobs and choice.logprobs.tokens) or []
    assert text == whole.text
    assert tokens == listed.tokens
