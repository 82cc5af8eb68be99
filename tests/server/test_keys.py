"""API keys: where they come from, what is kept of them, and what they keep apart."""

from __future__ import annotations

import hashlib

import aiohttp
import pytest

from miniinfer.cli import build_parser, main
from miniinfer.cli.serve import server_config
from miniinfer.server.keys import ApiKey, find_key, parse_key_file, party_salt

from .real import real_server, until_idle

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}


def config_of(*arguments):
    return server_config(build_parser().parse_args(["serve", *arguments]))


def test_a_key_is_kept_as_its_hash():
    key = ApiKey.of("secret")
    assert key.digest == hashlib.sha256(b"secret").digest()
    assert "secret" not in repr(key)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\ta"])
def test_keys_that_no_header_can_hold(key):
    with pytest.raises(ValueError, match="API key"):
        ApiKey.of(key)


def test_every_key_is_compared(monkeypatch):
    keys = [ApiKey.of(text) for text in ("a", "b", "c")]
    compared = []

    def compare(one, other):
        compared.append(other)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert find_key(keys, b"a") is keys[0]
    assert compared == [key.digest for key in keys]
    assert find_key(keys, b"d") is None
    assert len(compared) == 6


def test_key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nplain\n\n  alice : sk-1 \nbob:sk:2\n")
    config = config_of("--api-key-file", str(path), "--api-key", "flag")
    assert config.api_keys == (
        ApiKey.of("flag"),
        ApiKey.of("plain"),
        ApiKey.of("sk-1", "alice"),
        ApiKey.of("sk:2", "bob"),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ok\na b\n", "line 2"),
        ("a:\n", "line 1"),
        ("\x1b[0m:key\n", "line 1"),
        ("# none\n", "no key"),
    ],
)
def test_bad_key_files_exit_with_2(tmp_path, capsys, text, named):
    path = tmp_path / "keys"
    path.write_text(text)
    assert main(["serve", "--dry-run", "--api-key-file", str(path)]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1


def test_a_key_file_that_is_not_there(tmp_path, capsys):
    assert main(["serve", "--dry-run", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_file_s_errors_do_not_show_keys():
    with pytest.raises(ValueError, match="line 1") as caught:
        parse_key_file("name:sec ret")
    assert "ret" not in str(caught.value)


OPEN = {"/health", "/ping", "/ready"}


async def test_every_route_but_probes_needs_a_key(start, engine):
    client = await start(engine, api_keys=("right",))
    answered = {}
    for route in client.app.router.routes():
        path = route.resource.canonical.replace("{", "").replace("}", "")
        async with client.request(route.method, path) as response:
            answered[path] = response.status
    assert len(answered) > 10
    assert {path for path, status in answered.items() if status != 401} == OPEN


@pytest.mark.parametrize(
    "path", ["/no/such/route", "/health/", "/health/x", "/HEALTH", "/v1/health"]
)
async def test_other_paths_need_a_key_too(start, engine, path):
    client = await start(engine, api_keys=("right",))
    async with client.get(path) as response:
        assert response.status == 401


async def test_metrics_without_a_key_by_choice(start, engine):
    client = await start(engine, api_keys=("right",), metrics_without_key=True)
    async with client.get("/metrics") as response:
        assert response.status == 200
    async with client.get("/healthz") as response:
        assert response.status == 401


async def test_a_refused_key_gets_cors_headers(start, engine):
    client = await start(engine, api_keys=("right",), allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with client.options(CHAT, headers=headers) as response:
        assert response.status == 204
    async with client.post(CHAT, json=BODY, headers={"Origin": "https://a.example"}) as response:
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"


async def test_each_party_has_its_own_salt(start, engine):
    async def salt_of(key, **fields):
        headers = {"Authorization": f"Bearer {key}"}
        async with client.post(CHAT, json=BODY | fields, headers=headers) as response:
            assert response.status == 200
        return engine.requests[-1].options["cache_salt"]

    client = await start(engine, api_keys=("one", "two"))
    salts = [await salt_of("one"), await salt_of("two"), await salt_of("one", cache_salt="x")]
    assert len(set(salts)) == 3
    assert await salt_of("one") == salts[0]
    # A party cannot name another's salt by bringing it as its own.
    assert await salt_of("two", cache_salt=salts[0]) != salts[0]
    client = await start(engine, api_keys=("one", "two"), share_prefix_cache=True)
    assert await salt_of("one") is None
    assert await salt_of("two", cache_salt="x") == "x"


def test_keys_of_one_name_are_one_party():
    old, new = ApiKey.of("1", "alice"), ApiKey.of("2", "alice")
    assert party_salt(old.tenant, None) == party_salt(new.tenant, None)
    assert party_salt(old.tenant, None) != party_salt(ApiKey.of("1").tenant, None)


@pytest.mark.parametrize("shared", [False, True])
async def test_another_key_cannot_probe_prefixes(tiny_model, shared):
    body = {
        "messages": [{"role": "user", "content": "a long secret that somebody has sent" * 3}],
        "max_tokens": 1,
    }
    keys = (ApiKey.of("one"), ApiKey.of("two"))

    async def cached(key):
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(CHAT, json=body, headers=headers) as response:
            usage = (await response.json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    async with (
        real_server(tiny_model, api_keys=keys, share_prefix_cache=shared) as (url, llm),
        aiohttp.ClientSession(url) as session,
    ):
        assert await cached("one") == 0
        assert await cached("one") > 50
        assert (await cached("two") > 0) == shared
        await until_idle(llm)
