"""What /v1/responses remembers: stored responses, who finds them, and when they are forgotten."""

from __future__ import annotations

import openai
import pytest

from miniinfer.server.responses_store import ResponseStore, StoredResponse

from .named_events import read_named_events
from .said import PARSERS, SAID

URL = "/v1/responses"


async def ask(client, *, headers=None, **fields):
    async with client.post(URL, json={"input": "hey", **fields}, headers=headers) as response:
        body = await response.json()
        assert response.status == 200, body
    return body


async def is_found(client, response_id: str, headers=None) -> bool:
    async with client.get(f"{URL}/{response_id}", headers=headers) as response:
        body = await response.json()
        assert response.status in (200, 404)
        if response.status == 404:
            assert body["error"]["code"] == "response_not_found"
            assert response_id in body["error"]["message"]
        return response.status == 200


@pytest.mark.parametrize("name", ["text", "everything", "cut in a call"])
async def test_a_stored_response_is_the_one_that_was_sent(start, engine, name):
    client = await start(engine, **PARSERS)
    engine.script = SAID[name]
    whole = await ask(client)
    async with client.get(f"{URL}/{whole['id']}") as response:
        assert await response.json() == whole
    async with client.post(URL, json={"input": "hey", "stream": True}) as response:
        last = (await read_named_events(response))[-1]["response"]
    async with client.get(f"{URL}/{last['id']}") as response:
        assert await response.json() == last


async def test_a_response_can_be_deleted_once(client):
    answer = await ask(client)
    async with client.delete(f"{URL}/{answer['id']}") as response:
        assert await response.json() == {
            "id": answer["id"],
            "object": "response",
            "deleted": True,
        }
    assert not await is_found(client, answer["id"])
    async with client.delete(f"{URL}/{answer['id']}") as response:
        assert response.status == 404


async def test_nothing_is_stored_unless_wanted(client):
    answer = await ask(client, store=False)
    assert answer["store"] is False
    assert not await is_found(client, answer["id"])
    async with client.post(URL, json={"input": "a", "previous_response_id": answer["id"]}) as got:
        assert (await got.json())["error"]["code"] == "previous_response_not_found"
        assert got.status == 400


async def test_stored_responses_are_not_streamed(client):
    answer = await ask(client)
    async with client.get(f"{URL}/{answer['id']}?stream=true") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "stream"
    async with client.get(f"{URL}/{answer['id']}?stream=false") as response:
        assert response.status == 200


async def test_a_conversation_goes_on(start, engine):
    client = await start(engine, **PARSERS)
    engine.max_model_len = 1000
    engine.script = SAID["everything"]
    tool = {"type": "function", "name": "roll", "parameters": {"type": "object"}}
    first = await ask(client, input="one", instructions="Be kind.", tools=[tool])
    call = first["output"][2]
    engine.script = SAID["text"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "6"}
    second = await ask(client, input=[output], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    await ask(client, input="two", instructions="Be brief.", previous_response_id=second["id"])
    function = {"name": "roll", "arguments": '{"sides": 6}'}
    assert engine.tokenizer.chats[-1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {
            "role": "assistant",
            "content": "Look: ",
            "reasoning_content": "hm",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "content": "6", "tool_call_id": call["call_id"]},
        {"role": "assistant", "content": "Hello 🙂"},
        {"role": "user", "content": "two"},
    ]


async def test_a_conversation_can_branch(client, engine):
    first = await ask(client, input="one")
    for _ in range(2):
        await ask(client, input="two", previous_response_id=first["id"])
        contents = [message["content"] for message in engine.tokenizer.chats[-1][0]]
        assert contents == ["one", "Hello", "two"]


async def test_nobody_finds_the_responses_of_another(start, engine):
    client = await start(engine, api_keys=("mine", "yours"))
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    answer = await ask(client, headers=mine)
    assert not await is_found(client, answer["id"], yours)
    body = {"input": "a", "previous_response_id": answer["id"]}
    async with client.post(URL, json=body, headers=yours) as response:
        assert response.status == 400
    async with client.delete(f"{URL}/{answer['id']}", headers=yours) as response:
        assert response.status == 404
    assert await is_found(client, answer["id"], mine)


def stored(size: int) -> StoredResponse:
    return StoredResponse(body=b"b" * (size - 2), conversation=b"[]")


def test_the_least_recently_used_is_forgotten_first():
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for name in "abc":
        store.put("", name, stored(10))
    assert store.get("", "a") is not None
    store.put("", "d", stored(10))
    assert [name for name in "abcd" if store.get("", name)] == ["a", "c", "d"]


def test_the_size_of_all_is_bounded():
    store = ResponseStore(max_responses=100, max_bytes=100)
    for name in "abc":
        store.put("", name, stored(40))
    assert [name for name in "abc" if store.get("", name)] == ["b", "c"]
    store.put("", "d", stored(101))
    assert [name for name in "abcd" if store.get("", name)] == ["b", "c"]
    store.put("", "c", stored(60))
    assert [name for name in "abcd" if store.get("", name)] == ["b", "c"]
    store.put("", "e", stored(100))
    assert [name for name in "abcde" if store.get("", name)] == ["e"]
    assert store.delete("", "e")
    for name in "xy":
        store.put("", name, stored(50))
    assert [name for name in "xy" if store.get("", name)] == ["x", "y"]


async def test_openais_client_retrieves_and_deletes(client):
    async with openai.AsyncOpenAI(
        base_url=str(client.make_url("/v1")), api_key="none", max_retries=0
    ) as official:
        answer = await official.responses.create(model="fake-model", input="hey")
        found = await official.responses.retrieve(answer.id)
        assert found == answer
        follow = await official.responses.create(
            model="fake-model", input="and", previous_response_id=answer.id
        )
        assert follow.previous_response_id == answer.id
        await official.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError, match=answer.id):
            await official.responses.retrieve(answer.id)
