"""LiteLLM against the server over a real engine."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from .clients.asks import DICE_FORM, MESSAGES, ROLL, ROLL_NAMED, checked_dice
from .conftest import TinyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # Imported late: it takes seconds, and without the setting it asks the network for prices.
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture
def asked(tiny_server: TinyServer) -> dict[str, Any]:
    return {
        "model": "openai/tiny",
        "api_base": f"{tiny_server.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
    }


async def test_text_whole_and_streamed(litellm: ModuleType, asked: dict[str, Any]) -> None:
    asked |= {"max_tokens": 12}
    whole = await litellm.acompletion(**asked)
    text = whole.choices[0].message.content
    assert text
    assert 1 <= whole.usage.completion_tokens <= 12
    stream = await litellm.acompletion(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == whole.usage.completion_tokens

    def blocking() -> str:
        return "".join(
            chunk.choices[0].delta.content or ""
            for chunk in litellm.completion(**asked, stream=True)
        )

    assert await asyncio.to_thread(blocking) == text


async def test_a_forced_tool_call(litellm: ModuleType, asked: dict[str, Any]) -> None:
    asked |= {"tools": [ROLL], "tool_choice": ROLL_NAMED}
    whole = await litellm.acompletion(**asked)
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "roll"
    checked_dice(call.function.arguments)
    chunks = [chunk async for chunk in await litellm.acompletion(**asked, stream=True)]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    [streamed] = rebuilt.choices[0].message.tool_calls
    assert streamed.function.name == "roll"
    assert streamed.function.arguments == call.function.arguments


async def test_a_schema(litellm: ModuleType, asked: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**asked, response_format=DICE_FORM)
    checked_dice(whole.choices[0].message.content)


async def test_an_error_is_of_the_right_kind(litellm: ModuleType, asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="n must be"):
        await litellm.acompletion(**asked, n=0)
