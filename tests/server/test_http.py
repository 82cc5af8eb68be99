"""Everything around the generating routes: bodies, keys, CORS, errors, health, metrics."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

import miniinfer

from .fake import FakeEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}
RAW = json.dumps(BODY).encode()
JSON = {"Content-Type": "application/json"}


async def error_of(response, status, code=None):
    body = await response.json()
    assert response.status == status, body
    assert response.headers["Content-Type"].startswith("application/json")
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["X-Request-Id"]
    if code is not None:
        assert body["error"]["code"] == code
    return body["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  \n",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'messages': []}",
        RAW + b"x",
        b'{"messages": "\xff"}',
        b'{"unknown": "\xff", ' + RAW[1:],
        b'{"unknown": NaN, ' + RAW[1:],
        b'{"temperature": NaN, ' + RAW[1:],
        b'{"temperature": Infinity, ' + RAW[1:],
        b'{"temperature": -Infinity, ' + RAW[1:],
        b'{"temperature": 1e999, ' + RAW[1:],
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b", " + RAW[1:],
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\udfff", ' + RAW[1:],
        b"\x00" * 100,
        b"\xef\xbb\xbf" + RAW,
        gzip.compress(RAW, mtime=0),
    ],
)
async def test_bad_bodies(client, engine, raw):
    async with client.post(CHAT, data=raw, headers=JSON) as response:
        await error_of(response, 400)
    assert not engine.requests


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
async def test_what_is_no_number_is_named(client, number):
    raw = b'{"temperature": ' + number + b", " + RAW[1:]
    async with client.post(CHAT, data=raw, headers=JSON) as response:
        error = await error_of(response, 400, "invalid_json")
    assert "no NaN and no Infinity" in error["message"]


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud800", rb"\ud800"),
        (rb"a\uDC00", rb"\uDC00"),
        (rb"\\\uD83D", rb"\uD83D"),
        (rb"\ud83d\ude00\ud83d\n", rb"\ud83d"),
    ],
)
async def test_half_of_a_pair_is_named(client, text, half):
    raw = b'{"structured_outputs": {"choice": ["' + text + b'"]}, ' + RAW[1:]
    async with client.post(CHAT, data=raw, headers=JSON) as response:
        error = await error_of(response, 400, "invalid_json")
    assert f"{half.decode()} at byte {raw.rindex(half)} is half" in error["message"]
    whole = b'{"user": "\\\\ud800 \\ud83d\\ude00", ' + RAW[1:]
    async with client.post(CHAT, data=whole, headers=JSON) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "content_type", [None, "application/json; charset=utf-8", "text/plain", "nonsense"]
)
async def test_v65_any_content_type_is_read_as_json(client, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    skip = ["Content-Type"] if content_type is None else None
    async with client.post(CHAT, data=RAW, headers=headers, skip_auto_headers=skip) as response:
        assert response.status == 200


async def test_gzip_body(client):
    headers = {**JSON, "Content-Encoding": "gzip"}
    async with client.post(CHAT, data=gzip.compress(RAW, mtime=0), headers=headers) as response:
        assert response.status == 200
    async with client.post(CHAT, data=b"not gzip", headers=headers) as response:
        assert response.status == 400


@pytest.mark.parametrize("encoding", [None, "gzip"])
async def test_body_too_large(start, engine, encoding):
    client = await start(engine, max_body_size=1000)
    raw = RAW + b" " * 100_000
    headers = dict(JSON)
    if encoding:
        raw = gzip.compress(raw, mtime=0)
        headers["Content-Encoding"] = encoding
    async with client.post(CHAT, data=raw, headers=headers) as response:
        error = await error_of(response, 413, "request_too_large")
    assert "1000" in error["message"]


@pytest.mark.parametrize("path", ["/v1/nope", "/", "/v1/chat/completions/", "/v1/models/"])
async def test_v66_unknown_routes(client, path):
    async with client.get(path) as response:
        await error_of(response, 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/generate", "POST"),
        ("POST", "/v1/models", "GET"),
        ("OPTIONS", CHAT, "POST"),
        ("PUT", "/health", "GET"),
    ],
)
async def test_v66_wrong_method(client, method, path, allowed):
    async with client.request(method, path) as response:
        await error_of(response, 405, "method_not_allowed")
        assert allowed in response.headers["Allow"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
@pytest.mark.parametrize("model", ["nope", ""])
async def test_v66_unknown_model(client, engine, path, body, model):
    async with client.post(path, json={**body, "model": model}) as response:
        error = await error_of(response, 404, "model_not_found")
    assert error["param"] == "model"
    assert repr(model) in error["message"]
    assert not engine.requests


async def test_a_defect_is_a_500_that_tells_nothing(client, engine, caplog):
    def broken(*args, **options):
        raise RuntimeError("secret detail")

    engine.tokenizer.apply_chat_template = broken
    async with client.post(CHAT, json=BODY) as response:
        error = await error_of(response, 500)
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer right"},
        {"Authorization": "bearer right"},
        {"Authorization": "BEARER  right"},
        {"Authorization": "Bearer other"},
        {"X-Api-Key": "right"},
    ],
)
async def test_v66_right_key(start, engine, headers):
    client = await start(engine, api_keys=("right", "other"))
    async with client.post(CHAT, json=BODY, headers=headers) as response:
        assert response.status == 200
    assert engine.requests[0].options["tenant"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic right"},
        {"Authorization": "right"},
        {"Authorization": "Bearer rïght"},
        {"X-Api-Key": ""},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/metrics", "/v1/models", "/healthz", "/nope", "/load"])
async def test_v66_wrong_key(start, engine, headers, path):
    client = await start(engine, api_keys=("right",))
    async with client.get(path, headers=headers) as response:
        error = await error_of(response, 401, "invalid_api_key")
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert error["type"] == "authentication_error"


async def test_answers_say_which_server_they_are_from(client):
    expected = f"miniinfer/{miniinfer.__version__}"
    for path in ("/health", "/v1/models", "/nothing"):
        async with client.get(path) as response:
            assert response.headers["Server"] == expected
    async with client.post(CHAT, json={**BODY, "stream": True}) as response:
        assert response.headers["Server"] == expected
        await response.read()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"no HTTP\r\n\r\n")
    assert f"\r\nServer: {expected}\r\n".encode() in await reader.read()
    writer.close()


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_need_no_key(start, engine, path):
    client = await start(engine, api_keys=("right",))
    async with client.get(path) as response:
        assert response.status == 200
    async with client.head(path) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("*",), "https://b.example", "*"),
    ],
)
async def test_v74_cors(start, engine, allowed, origin, expected):
    client = await start(engine, allowed_origins=allowed, api_keys=("right",))
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with client.options(CHAT, headers=preflight) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == expected
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert "authorization" in response.headers["Access-Control-Allow-Headers"]
    async with client.post(CHAT, json=BODY, headers={"Origin": origin}) as response:
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == expected
    headers = {"Origin": origin, "Authorization": "Bearer right"}
    async with client.post(CHAT, json={**BODY, "stream": True}, headers=headers) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == expected


@pytest.mark.parametrize("allowed", [(), ("https://a.example",)])
async def test_cors_for_other_origins_stays_off(start, engine, allowed):
    client = await start(engine, allowed_origins=allowed)
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "POST"):
        async with client.request(method, CHAT, data=RAW, headers=headers) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_loading(start):
    future = asyncio.get_running_loop().create_future()
    client = await start(future)
    for path in ("/health", "/ping", "/healthz"):
        async with client.get(path) as response:
            assert response.status == 503
            assert (await response.json())["status"] == "loading"
            assert response.headers["Retry-After"]
    for path in ("/v1/models", "/metrics", "/version", "/load"):
        async with client.get(path) as response:
            await error_of(response, 503, "loading")
            assert response.headers["Retry-After"]
    async with client.post(CHAT, json=BODY) as response:
        await error_of(response, 503, "loading")
    async with client.get("/nope") as response:
        await error_of(response, 404)
    engine = FakeEngine()
    future.set_result(engine)
    async with client.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    async with client.post(CHAT, json=BODY) as response:
        assert response.status == 200
    await client.close()
    assert engine.closed


async def test_failed_load(start):
    future = asyncio.get_running_loop().create_future()
    future.set_exception(OSError("no such file"))
    client = await start(future)
    async with client.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "failed"})
    async with client.post(CHAT, json=BODY) as response:
        await error_of(response, 503, "engine_failed")


async def test_http_1_0_client_gets_a_stream_without_chunking(client):
    body = json.dumps({**BODY, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def test_an_unknown_expectation_is_answered(client):
    async with client.post(CHAT, json=BODY, headers={"Expect": "a-miracle"}) as response:
        assert response.status == 417
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**BODY, "model": "m" * 100_000}),
        (CHAT, {"messages": [{"role": "r" * 100_000, "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "t" * 100_000}]}]}),
        (CHAT, {**BODY, "max_tokens": 10**4000}),
        (CHAT, {**BODY, "n": 10**4000}),
        ("/v1/completions", {"prompt": [1, 10**4000]}),
        ("/v1/completions", {"prompt": "a", "best_of": 10**4000}),
        ("/detokenize", {"tokens": [10**4000]}),
    ],
)
async def test_an_error_does_not_repeat_a_long_value(client, path, body):
    async with client.post(path, json=body) as response:
        assert response.status in (400, 404)
        message = (await response.json())["error"]["message"]
    assert len(message) < 2000
    assert "characters left out" in message


@pytest.mark.parametrize("header", [b"Authorization: Bearer \xff\xfe", b"X-Api-Key: \xed\xa0\x80"])
async def test_a_key_that_is_not_utf8(start, engine, header):
    client = await start(engine, api_keys=("right",))
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        # By hand, as no client library sends such bytes.
        writer.write(b"GET /load HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_no_http_is_answered_with_the_error_object(client, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        writer.write(raw)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
