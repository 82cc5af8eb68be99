"""The routes that generate nothing."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .fake import VOCAB_SIZE
from .test_http import BODY, CHAT, error_of


async def test_models(start, engine):
    client = await start(engine, served_model_names=("org/a", "b"))
    async with client.get("/v1/models") as response:
        listed = await response.json()
    assert [model["id"] for model in listed["data"]] == ["org/a", "b"]
    assert listed["data"][0]["max_model_len"] == 64
    async with client.get("/v1/models/org/a") as response:
        assert await response.json() == listed["data"][0]
    async with client.get("/v1/models/fake-model") as response:
        await error_of(response, 404, "model_not_found")
    async with client.post(CHAT, json={**BODY, "model": "b"}) as response:
        assert (await response.json())["model"] == "b"


async def test_health_details(client, engine):
    engine.counters["kv_blocks_used"] = 5
    async with client.get("/healthz") as response:
        body = await response.json()
    assert body["status"] == "ok"
    assert body["stats"]["kv_blocks_used"] == 5


async def test_version_and_reset(client):
    async with client.get("/version") as response:
        assert set(await response.json()) == {"version"}
    async with client.post("/reset_prefix_cache") as response:
        assert response.status == 200


async def test_tokenize_prompt(client, engine):
    engine.tokenizer.adds_bos = True
    async with client.post("/tokenize", json={"prompt": "ab"}) as response:
        body = await response.json()
    assert body == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [256, 97, 98],
        "token_strs": None,
    }
    fields = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    async with client.post("/tokenize", json=fields) as response:
        body = await response.json()
    assert (body["tokens"], body["token_strs"]) == ([97, 98], ["a", "b"])
    async with client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}) as r:
        assert (await r.json())["tokens"] == []


async def test_tokenize_messages(client, engine):
    fields = {**BODY, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    async with client.post("/tokenize", json=fields) as response:
        assert (await response.json())["tokens"] == [*b"hey", 0, 0, 0]
    [(_, options)] = engine.tokenizer.chats
    assert options["add_generation_prompt"] is False
    assert options["a"] == 1


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", **BODY}, {"prompt": 5}, {"prompt": ["a"]}, {"messages": []}]
)
async def test_bad_tokenize(client, body):
    async with client.post("/tokenize", json=body) as response:
        await error_of(response, 400)


async def test_detokenize(client):
    async with client.post("/detokenize", json={"tokens": [97, 98]}) as response:
        assert await response.json() == {"prompt": "ab"}
    async with client.post("/detokenize", json={"tokens": []}) as response:
        assert await response.json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[-1], [VOCAB_SIZE], [1.5], [True], ["a"], None, "a", [10**30]])
async def test_bad_detokenize(client, tokens):
    async with client.post("/detokenize", json={"tokens": tokens}) as response:
        error = await error_of(response, 400)
    assert error["param"] == "tokens"


async def test_metrics(client, engine):
    engine.counters |= {
        "prompt_tokens": 10,
        "generation_tokens": 7,
        "kv_blocks_used": 1,
        "kv_blocks_total": 4,
        "time_to_first_token_seconds": ([0.1, 1.0], [1, 2, 3], 9.5),
    }
    async with client.post(CHAT, json={**BODY, "stream": True}) as response:
        await response.read()
    samples = await scrape(client)
    labels = (("model_name", "fake-model"),)
    assert samples["miniinfer:prompt_tokens_total", labels] == 10
    assert samples["miniinfer:kv_cache_usage_perc", labels] == 0.25
    assert samples["miniinfer:num_requests_running", labels] == 1
    success = (("finished_reason", "stop"), *labels)
    assert samples["miniinfer:request_success_total", success] == 2
    first_token = "miniinfer:time_to_first_token_seconds"
    assert samples[first_token + "_count", labels] == 6
    assert samples[first_token + "_sum", labels] == 9.5
    assert samples[first_token + "_bucket", (("le", "1.0"), *labels)] == 3
    assert samples["miniinfer:request_generation_tokens_sum", labels] == 5


async def test_counters_never_go_back(client, engine):
    labels = (("model_name", "fake-model"),)
    for reported, expected in ((10, 10), (4, 10), (-5, 10), (12, 12)):
        engine.counters["prefix_cache_hits"] = reported
        samples = await scrape(client)
        assert samples["miniinfer:prefix_cache_hits_total", labels] == expected


async def scrape(client):
    async with client.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
