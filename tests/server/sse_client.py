"""Reads event streams as strictly as a client may: events, order, and what ends them."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse


async def read_events(response: ClientResponse) -> list[dict[str, Any]]:
    """Return the data of all events; asserts the framing and exactly one `[DONE]` at the end."""
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    events = parse_events(await response.text())
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def parse_events(body: str) -> list[str]:
    """Return the data of each event, without comments."""
    assert body.endswith("\n\n")
    data = []
    for block in body[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        data.append(block.removeprefix("data: "))
    return data


def check_chat_chunks(events: list[dict[str, Any]], choices: int = 1) -> dict[int, str]:
    """Assert what every chat stream promises and return the text of each choice."""
    for key in ("id", "created", "model", "object"):
        assert len({event[key] for event in events}) == 1, key
    assert events[0]["object"] == "chat.completion.chunk"
    texts: dict[int, str] = {}
    finished: set[int] = set()
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            assert "finish_reason" in choice
            assert index not in finished, "a chunk after the finish"
            if index not in texts:
                assert delta == {"role": "assistant", "content": ""}
                texts[index] = ""
                continue
            assert "role" not in delta
            if choice["finish_reason"] is not None:
                assert delta == {}
                finished.add(index)
            else:
                assert delta.get("content") or choice["logprobs"] or "token_ids" in choice
                texts[index] += delta.get("content", "")
    assert finished == set(texts) == set(range(choices))
    return texts


def streamed_messages(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Add up the deltas of each choice as strict clients do, and return them as choices.

    Asserts the form of tool calls: id, type and name come once, in the first delta of a call, and
    every delta has the call's index.
    """
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            delta = chunk["delta"]
            choice = choices.setdefault(chunk["index"], {"content": "", "tool_calls": []})
            assert choice.get("finish_reason") is None, "a chunk after the finish"
            choice["finish_reason"] = chunk["finish_reason"]
            choice["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                before = choice.setdefault("reasoning_content", "")
                choice["reasoning_content"] = before + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                _add_call(choice["tool_calls"], call)
    return choices


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        assert set(delta) == {"index", "id", "type", "function"}
        assert delta["function"]["arguments"] == ""
        function = {"name": delta["function"]["name"], "arguments": ""}
        calls.append({"id": delta["id"], "type": delta["type"], "function": function})
        return
    assert set(delta) == {"index", "function"}
    assert set(delta["function"]) == {"arguments"}
    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
