"""Connections: slow, half closed, too many, too long, not HTTP, encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from miniinfer.cli import main
from miniinfer.server.connection import descriptor_limit
from miniinfer.server.run import ServerStartError
from miniinfer.server.tls import TLSError, server_context

from .fake import FakeDelta, FakeEngine, Pause, answer
from .serving import serving

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hey"}]}


def post(body, *, version="1.1", length=None):
    raw = json.dumps(body).encode()
    lines = (
        f"POST {CHAT} HTTP/{version}",
        "Host: x",
        f"Content-Length: {len(raw) if length is None else length}",
    )
    return "\r\n".join((*lines, "", "")).encode() + raw


@contextlib.asynccontextmanager
async def connected(session, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def parts_of(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.decode(), body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("seconds", [0, 0.2, 0.9])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_half_closed_client_gets_its_answer(engine, stream, seconds, version):
    engine.script = lambda ids, params: [seconds, *answer(params, ["a", "b"])]
    async with serving(engine) as session, connected(session) as (reader, writer):
        writer.write(post({**BODY, "stream": stream}, version=version))
        writer.write_eof()
        received = await reader.read()
    # Interim answers are skipped, as RFC 9110 asks of every client.
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    assert received.startswith(f"HTTP/{version} 200 ".encode())
    end = b"data: [DONE]\n\n" if version == "1.0" else b"data: [DONE]\n\n\r\n0\r\n\r\n"
    assert received.endswith(end if stream else b"}")
    assert b'"stop"' in received


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_is_noticed(engine, stream, version):
    pause = Pause()
    engine.script = lambda ids, params: [pause]
    async with serving(engine, keep_alive_interval=0) as session:
        async with connected(session) as (_, writer):
            writer.write(post({**BODY, "stream": stream}, version=version))
            await pause.reached.wait()
        await until(lambda: engine.requests[0].stream.cancelled)


async def test_a_client_that_closes_in_the_middle_of_a_stream_is_noticed(engine):
    def script(ids, params):
        for number in range(10_000):
            yield FakeDelta("x", num_output_tokens=number + 1)
            yield 0.005

    engine.script = script
    async with serving(engine) as session:
        async with connected(session) as (reader, writer):
            writer.write(post({**BODY, "stream": True}))
            await reader.readuntil(b"data: ")
        await until(lambda: engine.requests[0].stream.cancelled)


async def test_a_half_closed_client_of_http_1_0_gets_its_stream(engine):
    engine.script = lambda ids, params: [
        *answer(params, ["a", "b"])[:1],
        0.3,
        *answer(params, ["c"]),
    ]
    async with serving(engine) as session, connected(session) as (reader, writer):
        writer.write(post({**BODY, "stream": True}, version="1.0"))
        begun = await reader.readuntil(b"data: ")
        writer.write_eof()
        rest = await reader.read()
    assert begun.startswith(b"HTTP/1.0 200 ")
    assert b": keep-alive\n\n" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"\r\n" not in rest


async def test_a_client_that_closes_in_its_body_starts_nothing(engine):
    async with serving(engine) as session:
        async with connected(session) as (reader, writer):
            writer.write(post(BODY, length=10_000))
            writer.write_eof()
            assert await reader.read() == b""
        async with session.get("/load") as response:
            assert (await response.json())["server_load"] == 0
    assert engine.requests == []


async def test_a_body_that_does_not_come(engine):
    async with serving(engine, body_timeout=0.1) as session, connected(session) as (reader, writer):
        writer.write(post(BODY, length=10_000))
        head, body = parts_of(await reader.readuntil(b"}}"))
        assert " 408 " in head
        assert "connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert error["code"] == "body_timeout"
        assert "0.1 s" in error["message"]
        assert await reader.read() == b""
    assert engine.requests == []


async def test_headers_that_do_not_come(engine):
    async with serving(engine, idle_timeout=0.2) as session, connected(session) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\n")

        async def drip():
            while True:
                await asyncio.sleep(0.05)
                writer.write(b"X-Slow: 1\r\n")

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def test_a_connection_that_says_nothing_is_closed(engine):
    async with serving(engine, idle_timeout=0.1) as session:
        async with connected(session) as (reader, _):
            assert await reader.read() == b""
        async with connected(session) as (reader, writer):
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            received = await reader.read()
            assert received.startswith(b"HTTP/1.1 200 ")


async def test_a_long_answer_outlives_the_idle_timeout(engine):
    engine.script = lambda ids, params: [0.5, *answer(params, ["a"])]
    async with (
        serving(engine, idle_timeout=0.1) as session,
        session.post(CHAT, json=BODY) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 1000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is TLS\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: nonsense\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_json(engine, caplog, raw):
    async with serving(engine, max_header_size=4096) as session:
        async with connected(session) as (reader, writer):
            writer.write(raw)
            head, body = parts_of(await reader.read())
        assert head.split()[1] == "400"
        error = json.loads(body)["error"]
        assert error["code"] == "bad_http"
        assert set(error) == {"message", "type", "param", "code"}
        async with session.get("/health") as response:
            assert response.status == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_connections_beyond_the_limit(engine):
    pause = Pause()
    engine.script = lambda ids, params: [pause, *answer(params, ["a"])]
    async with serving(engine, max_connections=2) as session:
        async with connected(session) as (reader, writer), connected(session):
            writer.write(post(BODY))
            await pause.reached.wait()
            for _ in range(20):
                async with connected(session) as (refused, _):
                    head, body = parts_of(await refused.read())
                assert " 503 " in head
                assert "Retry-After" in head
                assert json.loads(body)["error"]["code"] == "connections"
            pause.go.set()
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        while True:
            async with session.get("/metrics") as response:
                text = await response.text()
            if response.status == 200:
                break
    assert 'admission_rejections_total{model_name="fake-model",reason="connections"}' in text


def test_the_limit_on_descriptors_is_used():
    assert descriptor_limit() > 100


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    both = (folder / "cert.pem").read_text() + (folder / "key.pem").read_text()
    (folder / "both.pem").write_text(both)
    return folder


async def test_a_handshake_that_does_not_come(engine, certificate):
    files = {"tls_cert": str(certificate / "both.pem"), "idle_timeout": 0.2}
    async with serving(engine, **files) as session, connected(session) as (reader, _):
        assert await reader.read() == b""


def talk_to(command, url, monkeypatch):
    """A command against a server: its exit code, from a thread that may block."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    few = ["--num-requests", "2", "--num-warmup", "0"] if command == ("bench", "serve") else []
    return lambda *flags: asyncio.to_thread(main, [*command, "--url", url, *few, *flags])


@pytest.mark.parametrize("command", [("bench", "serve"), ("chat",)])
async def test_commands_at_a_server_with_a_certificate_of_its_own(
    engine, certificate, command, monkeypatch, capsys
):
    engine.script = lambda ids, params: answer(params, ["a"])
    engine.max_model_len = 10_000
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    async with serving(engine, tls_cert=cert, tls_key=key) as session:
        url = f"https://127.0.0.1:{session._base_url.port}"
        for flags in (("--insecure",), ("--cacert", cert)):
            assert await talk_to(command, url, monkeypatch)(*flags) == 0
        capsys.readouterr()
        served = len(engine.requests)
        await talk_to(command, url, monkeypatch)()
        refusal = capsys.readouterr().err
    assert len(engine.requests) == served
    assert "--cacert FILE trusts it, --insecure does not verify" in refusal
    assert "certificate" in refusal


@pytest.mark.parametrize("files", [("cert.pem", "key.pem"), ("both.pem", None)])
async def test_tls(engine, certificate, files):
    engine.script = lambda ids, params: answer(params, ["a"])
    cert, key = (file and str(certificate / file) for file in files)
    client = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with serving(engine, tls_cert=cert, tls_key=key) as session:
        url = f"https://127.0.0.1:{session._base_url.port}{CHAT}"
        for stream in (False, True):
            async with session.post(url, json={**BODY, "stream": stream}, ssl=client) as response:
                assert response.status == 200
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.post(url, json=BODY)
        old = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.post(url, json=BODY, ssl=old)


@pytest.mark.parametrize(
    ("cert", "key"), [("missing.pem", None), ("cert.pem", None), ("cert.pem", "cert.pem")]
)
async def test_bad_tls_files_name_the_file(certificate, cert, key):
    with pytest.raises(ServerStartError, match=str(certificate / cert)):
        async with serving(
            FakeEngine(),
            tls_cert=str(certificate / cert),
            tls_key=key and str(certificate / key),
        ):
            pass


def test_a_key_with_a_passphrase_is_refused(certificate):
    locked = certificate / "locked.pem"
    command = ("openssl", "ec", "-aes256", "-passout", "pass:x", "-in", certificate / "key.pem")
    subprocess.run([*command, "-out", locked], check=True, capture_output=True)
    with pytest.raises(TLSError, match="passphrase"):
        server_context(str(certificate / "cert.pem"), str(locked))


async def test_a_reset_connection_leaves_nothing(engine):
    pause = Pause()
    engine.script = lambda ids, params: [pause]
    async with serving(engine) as session:
        with socket.create_connection(("127.0.0.1", session._base_url.port)) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00" + b"\x00" * 4)
            raw.sendall(post(BODY))
            await pause.reached.wait()
        await until(lambda: engine.requests[0].stream.cancelled)
