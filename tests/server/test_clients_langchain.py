"""LangChain's client for OpenAI's API against the server over a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pydantic
import pytest
import pytest_asyncio

from .clients.asks import ROLL, checked_dice
from .conftest import TinyServer

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Dice(pydantic.BaseModel):
    """A die."""

    sides: Literal[6, 20]
    fair: bool


@pytest_asyncio.fixture(loop_scope="module")
async def model(
    tiny_server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ChatOpenAI]:
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    # Imported late: it takes seconds, and every process that collects tests reads this file.
    from langchain_openai import ChatOpenAI

    # Its own ones are never closed.
    async with httpx.AsyncClient() as for_async:
        with httpx.Client() as blocking:
            yield ChatOpenAI(
                model="tiny",
                base_url=f"{tiny_server.url}/v1",
                api_key=pydantic.SecretStr("none"),
                temperature=0,
                max_completion_tokens=100,
                max_retries=0,
                stream_usage=True,
                http_client=blocking,
                http_async_client=for_async,
            )


async def test_invoke_and_stream(model: ChatOpenAI) -> None:
    # Long enough that the engine cannot be done before the first piece is read.
    whole = await model.ainvoke("hi", max_tokens=100)
    assert isinstance(whole.content, str)
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 100
    total: Any = None
    pieces = 0
    async for chunk in model.astream("hi", max_tokens=100):
        total = chunk if total is None else total + chunk
        pieces += bool(chunk.content)
    assert pieces > 1
    assert total.content == whole.content
    reason = whole.response_metadata["finish_reason"]
    assert total.response_metadata["finish_reason"] == reason
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    blocking = await asyncio.to_thread(model.invoke, "hi", max_tokens=100)
    assert blocking.content == whole.content


async def test_bound_tools(model: ChatOpenAI) -> None:
    bound = model.bind_tools([ROLL], tool_choice="roll")
    whole = await bound.ainvoke("roll the dice")
    [call] = whole.tool_calls
    assert call["name"] == "roll"
    checked_dice(call["args"])
    assert not whole.invalid_tool_calls
    total: Any = None
    async for chunk in bound.astream("roll the dice"):
        total = chunk if total is None else total + chunk
    [streamed] = total.tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(
    model: ChatOpenAI, method: Literal["json_schema", "function_calling"]
) -> None:
    structured = model.with_structured_output(Dice, method=method)
    dice = await structured.ainvoke("roll the dice")
    assert isinstance(dice, Dice)
