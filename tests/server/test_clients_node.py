"""OpenAI's client for Node against the server over a real engine."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from .clients.asks import DICE_FORM, MESSAGES, ROLL, ROLL_NAMED, checked_dice
from .conftest import TinyServer
from .real import until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = Path(__file__).parent / "clients" / "openai_node.mjs"
ASKS = {"messages": MESSAGES, "tools": [ROLL], "tool_choice": ROLL_NAMED, "form": DICE_FORM}


class NodeClient:
    """Runs the script's scenarios against a server."""

    def __init__(self, url: str) -> None:
        assert os.environ.get("MINIINFER_NODE"), "MINIINFER_NODE is unset; `make test` sets it"
        self._url = url

    async def run(self, scenario: str) -> Any:
        """Return what the scenario printed."""
        node = await asyncio.create_subprocess_exec(
            "node",
            str(SCRIPT),
            self._url,
            scenario,
            json.dumps(ASKS),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await node.communicate()
        except BaseException:
            node.kill()
            raise
        assert node.returncode == 0, err.decode()
        return json.loads(out)


@pytest.fixture
def node(tiny_server: TinyServer) -> NodeClient:
    return NodeClient(tiny_server.url)


async def test_text_whole_and_streamed(node: NodeClient) -> None:
    found = await node.run("text")
    [choice] = found["whole"]["choices"]
    *chunks, last = found["chunks"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"] != ""
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == found["whole"]["usage"]["completion_tokens"] == 12


async def test_a_forced_tool_call(node: NodeClient) -> None:
    calls = []
    for choice in await node.run("tools"):
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "roll"
        assert call["id"]
        calls.append(checked_dice(call["function"]["arguments"]))
    whole, streamed = calls
    assert whole == streamed


async def test_an_answer_of_a_schema(node: NodeClient) -> None:
    whole, streamed = await node.run("form")
    assert checked_dice(whole["message"]["content"])
    assert whole["message"]["content"] == streamed["message"]["content"]
    assert whole["finish_reason"] == streamed["finish_reason"] == "stop"


async def test_leaving_in_the_middle_of_a_stream(node: NodeClient, tiny_server: TinyServer) -> None:
    llm = tiny_server.llm
    before = llm.stats()["finished_abort"]
    assert (await node.run("abort"))["pieces"] == 1
    await until_idle(llm)
    assert llm.stats()["finished_abort"] == before + 1


async def test_errors_arrive_as_the_clients_own(node: NodeClient) -> None:
    negative, none, unknown = await node.run("errors")
    assert (negative["kind"], negative["param"]) == ("BadRequestError", "temperature")
    assert negative["type"] == "invalid_request_error"
    assert "-1" in negative["message"]
    assert (none["kind"], none["param"]) == ("BadRequestError", "n")
    assert (unknown["kind"], unknown["code"]) == ("NotFoundError", "model_not_found")
