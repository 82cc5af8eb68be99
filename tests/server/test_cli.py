from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from miniinfer.cli import build_parser, main
from miniinfer.cli.backend import LocalBackend
from miniinfer.cli.flags import with_flags
from miniinfer.cli.http_backend import HttpBackend
from miniinfer.cli.options import UsageError, byte_size, json_object, template_text
from miniinfer.cli.repl import Repl
from miniinfer.cli.serve import server_config
from miniinfer.server.keys import ApiKey

from .fake import FakeDelta, FakeEngine, answer

ROOT = str(Path(__file__).resolve().parents[2])
HEAVY = ("torch", "aiohttp", "transformers", "tokenizers", "msgspec", "jinja2", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["chat", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from miniinfer.cli import build_parser\n"
        f"try: build_parser().parse_args({arguments!r})\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_spin_briefly_unless_told_otherwise(given, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Set first, so that what `main` sets is undone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--dry-run", "--port", "0"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_every_flag_has_help():
    import argparse

    def actions(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    yield from actions(child)
            else:
                yield action

    all_actions = list(actions(build_parser()))
    assert len(all_actions) > 40
    assert all(action.help for action in all_actions)


def test_the_help_of_parsers_names_them_all(capsys):
    from miniinfer.parsing import REASONING_PARSERS, TOOL_PARSERS

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join((*TOOL_PARSERS, "none")) in text
    assert ", ".join((*REASONING_PARSERS, "none")) in text


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("miniinfer ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["serve", "--port", "x"],
        ["serve", "--max-num-seqs", "0"],
        ["serve", "--max-model-len", "1.5"],
        ["serve", "--dtype", "int3"],
        ["serve", "--target-itl-ms", "soon"],
        ["serve", "--kv-cache-memory", "much"],
        ["serve", "--kv-cache-memory", "0"],
        ["serve", "--kv-cache-memory", "1G", "--num-kv-blocks", "5"],
        ["serve", "--default-chat-template-kwargs", "[1]"],
        ["serve", "--default-chat-template-kwargs", "{"],
        ["serve", "--default-chat-template-kwargs", "[" * 100_000],
        ["serve", "--chat-template", "/no/such/file"],
        ["serve", "--chat-template", "{{"],
        ["generate", "-p", "x", "--max-tokens", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert "error:" in err
    assert "--help" in err
    assert err.count("\n") == 1
    assert "positive_int" not in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--dry-run", "--port", "70000"], "error: --port must"),
        (["serve", "--dry-run", "--shutdown-timeout", "-1"], "error: --shutdown-timeout must"),
        (["serve", "--dry-run", "--target-itl-ms", "-1"], "error: --target-itl-ms must"),
        (["serve", "--stalled-client-timeout", "0"], "error: --stalled-client-timeout must"),
        (["serve", "--dry-run", "--seed", "-1"], "error: --seed must"),
        (["serve", "--dry-run", "--engines", "2000"], "error: --engines must"),
        (["serve", "--dry-run", "--api-processes", "2000"], "error: --api-processes must"),
        (
            ["serve", "--dry-run", "--layout", "one", "--api-processes", "2", "--engines", "3"],
            "--layout one excludes --api-processes 2 and --engines 3: ",
        ),
        (["serve", "--layout", "one", "--engines", "2"], "--layout one excludes --engines 2: "),
        (["serve", "--dry-run", "--restart-engine"], "--restart-engine needs an engine process"),
        (["serve", "--dry-run", "--api-key", ""], "API key"),
        (["serve", "--dry-run", "--tool-call-parser", "hermit"], "--tool-call-parser"),
        (["serve", "--dry-run", "--reasoning-parser", "x"], "--reasoning-parser"),
        (["generate"], "there is no prompt"),
        (["generate", ROOT], "there is no prompt"),
        (["generate", ""], "prompt"),
        (["generate", "-p", ""], "prompt"),
        (["generate", "model", "x", "-p", "y"], "two prompts"),
        (["generate", "x", "--temperature", "-1"], "--temperature must"),
        (["generate", "-p", "x", "--stop", ""], "--stop must"),
        (["chat", "--top-p", "0"], "--top-p must"),
        (["chat", "--url", "ftp://x"], "--url"),
        (
            ["chat", "--url", "x", "--device", "cuda", "--no-prefix-caching", "-tp", "2"],
            "--device, --no-prefix-caching, --tensor-parallel-size cannot be set with --url",
        ),
        (["chat", "--url", "x", "--chat-template", "{{ x }}"], "--chat-template cannot"),
        (["chat", "--url", "host:port"], "--url"),
        (["chat", "--url", "host:70000"], "--url"),
        (["chat", "--url", "http://[::1"], "--url"),
    ],
)
def test_values_out_of_range_exit_with_2(arguments, named, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "bench serve", "bench core"])
def test_a_flag_that_is_none_points_to_the_help_of_its_command(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), "--prot", "1"])
    assert exit_info.value.code == 2
    name = f"miniinfer {command}"
    assert capsys.readouterr().err.startswith(f"{name}: error: unrecognized arguments: --prot")
    with pytest.raises(SystemExit):
        main([*command.split(), "--prot=1"])
    told = f"{name}: error: unrecognized arguments: --prot=1 ({name} --help explains)\n"
    assert capsys.readouterr().err == told


def test_values_out_of_range_cost_no_load(monkeypatch):
    def load(args):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("miniinfer.AsyncLLM", SimpleNamespace(from_args=load))
    assert main(["chat", "--top-k", "-5"]) == 2
    assert main(["generate", "-p", "x", "--top-k", "-5"]) == 2


def test_dry_run_prints_the_settings_without_the_keys(capsys, monkeypatch):
    monkeypatch.setenv("MINIINFER_API_KEY", "from-the-environment")
    arguments = ["serve", "some/model", "--dry-run", "--port", "0", "--kv-cache-memory", "1GiB"]
    assert main([*arguments, "--default-chat-template-kwargs", '{"a": 1}']) == 0
    out = capsys.readouterr().out
    settings = json.loads(out)
    assert settings["engine"]["model"] == "some/model"
    assert settings["engine"]["kv_cache_memory"] == 2**30
    assert settings["server"]["default_chat_template_kwargs"] == {"a": 1}
    assert settings["server"]["api_keys"] == ["***"]
    assert "from-the-environment" not in out
    names = [name for part in settings.values() for name in part]
    assert len(names) == len(set(names))
    assert settings["processes"] == {
        "layout": "one",
        "api_processes": 1,
        "engines": 1,
        "restart_engine": False,
    }
    assert settings["logs"] == {"log_level": "info", "log_format": "text"}


@pytest.mark.parametrize(
    ("flags", "layout"),
    [([], "one"), (["--layout", "two"], "two"), (["--engines", "2"], "two")],
)
def test_dry_run_prints_how_processes_and_logs_would_be(flags, layout, capsys):
    more = ["--log-level", "error", "--log-format", "json"]
    if layout == "two":
        more.append("--restart-engine")
    assert main(["serve", "--dry-run", "--port", "0", "--device", "cpu", *flags, *more]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["processes"]["layout"] == layout
    assert settings["processes"]["engines"] == (2 if flags[:1] == ["--engines"] else 1)
    assert settings["processes"]["restart_engine"] is (layout == "two")
    assert settings["logs"] == {"log_level": "error", "log_format": "json"}


def test_dry_run_tries_what_a_start_needs(capsys, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--dry-run", "--port", str(port)]) == 1
    captured = capsys.readouterr()
    assert f"127.0.0.1:{port}" in captured.err
    assert captured.out == ""
    # A port that was tried is free again.
    for _ in range(2):
        assert main(["serve", "--dry-run", "--port", str(port)]) == 0
    capsys.readouterr()
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    for path in (broken, tmp_path / "missing.pem"):
        assert main(["serve", "--dry-run", "--port", "0", "--tls-cert", str(path)]) == 1
        assert str(path) in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    endpoint = ["--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]
    assert main(["serve", "--dry-run", "--port", "0", *endpoint]) == 1
    assert "opentelemetry-sdk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], "auto"), (["auto"], "auto"), (["none"], None), (["12.5"], 12.5)],
)
def test_the_target_of_a_step(given, expected, capsys):
    flags = [flag for value in given for flag in ("--target-itl-ms", value)]
    assert main(["serve", "--dry-run", "--port", "0", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["target_itl_ms"] == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("kv_cache_memory is too small", "--kv-cache-memory is too small"),
        ("raise num_kv_blocks or block_size", "raise --num-kv-blocks or --block-size"),
        ("enable_prefix_caching must be true", "--no-prefix-caching must be true"),
        ("stall_limit: 0", "--stalled-client-timeout: 0"),
        ("stalled_client_timeout: 0", "--stalled-client-timeout: 0"),
        ("port must be free", "--port must be free"),
        ("the port must be free", "the port must be free"),
        ("no file /srv/max_model_len/a.gguf", "no file /srv/max_model_len/a.gguf"),
        ("no_such_setting must be free", "no_such_setting must be free"),
        ("model must be a text", "model must be a text"),
    ],
)
def test_settings_are_called_as_their_flags(message, expected):
    command = build_parser().parse_args(["serve"]).command
    assert with_flags(message, command) == expected


@pytest.mark.parametrize(
    ("arguments", "model", "prompt"),
    [
        (["Once upon"], None, "Once upon"),
        (["some/model", "Once upon"], "some/model", "Once upon"),
        (["-p", "Once upon"], None, "Once upon"),
        (["some/model", "-p", "Once upon"], "some/model", "Once upon"),
        (["-p", "Once upon", "some/model"], "some/model", "Once upon"),
        (["--max-tokens", "3", "Once upon"], None, "Once upon"),
        (["Once upon", "--max-tokens", "3"], None, "Once upon"),
        (["--max-tokens", "3", "some/model", "Once upon"], "some/model", "Once upon"),
        (["--", "-x"], None, "-x"),
        (["-"], None, "from stdin"),
    ],
)
def test_the_prompt_of_generate(arguments, model, prompt, monkeypatch, capsys):
    engine = FakeEngine(lambda ids, params: answer(params, ["!"]))
    seen = []

    def load(args):
        seen.append(args.model)
        return engine

    monkeypatch.setattr("miniinfer.AsyncLLM", SimpleNamespace(from_args=load))
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert main(["generate", *arguments]) == 0
    assert seen == [model]
    assert bytes(engine.requests[0].token_ids).decode() == prompt
    assert capsys.readouterr().out == "!\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], ("env", "second")), (["--api-key", "a", "--api-key", "b"], ("a", "b"))],
)
def test_api_keys(arguments, expected, monkeypatch):
    monkeypatch.setenv("MINIINFER_API_KEY", "env, second")
    config = server_config(build_parser().parse_args(["serve", *arguments]))
    assert config.api_keys == tuple(map(ApiKey.of, expected))


def test_an_empty_key_in_the_environment_is_no_key(monkeypatch):
    monkeypatch.setenv("MINIINFER_API_KEY", "")
    assert server_config(build_parser().parse_args(["serve"])).api_keys == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 1000), ("2k", 2000), ("2KiB", 2048), ("1.5GiB", 3 * 2**29), ("800MB", 800 * 10**6)],
)
def test_byte_size(text, expected):
    assert byte_size(text) == expected


def test_json_object():
    assert json_object('{"a": [1]}') == {"a": [1]}


def test_template_text(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}é", encoding="utf-8")
    assert template_text(str(path)) == "{{ messages }}é"
    assert template_text("{% if x %}{% endif %}") == "{% if x %}{% endif %}"


class ScriptedBackend:
    """Yields listed pieces; an exception in the list is raised in its place."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    def chat(self, messages, options):
        self.seen.append(messages)
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def talk(monkeypatch, backend, *lines, **options):
    entered = iter(lines)

    def read(prompt):
        line = next(entered, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    return Repl(backend, {}, **options).run()


def test_conversation_is_kept(monkeypatch, capsys):
    backend = ScriptedBackend(["A", "B"], ["C"])
    assert talk(monkeypatch, backend, "one", "", "two", system="S") == 0
    assert "AB\n" in capsys.readouterr().out
    assert backend.seen[1] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "AB"},
        {"role": "user", "content": "two"},
    ]


def test_commands(monkeypatch, capsys):
    backend = ScriptedBackend(["A"], ["B"], ["C"])
    lines = ["/help", "one", "/reset", "two", "/system be brief", "three", "/nope", "/quit", "no"]
    assert talk(monkeypatch, backend, *lines) == 0
    captured = capsys.readouterr()
    assert "/reset" in captured.out
    assert "/nope" in captured.err
    assert backend.seen[1] == [{"role": "user", "content": "two"}]
    assert backend.seen[2] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "three"},
    ]


def test_interrupt_stops_the_answer_and_keeps_the_conversation(monkeypatch, capsys):
    backend = ScriptedBackend(["half", KeyboardInterrupt()], ["B"])
    assert talk(monkeypatch, backend, "one", "two", KeyboardInterrupt()) == 0
    assert "[stopped]" in capsys.readouterr().out
    assert backend.seen[1][1] == {"role": "assistant", "content": "half"}


def test_failed_turn_is_forgotten(monkeypatch, capsys):
    backend = ScriptedBackend(["half", RuntimeError("gone")], ["B"])
    assert talk(monkeypatch, backend, "one", "two") == 0
    assert "gone" in capsys.readouterr().err
    assert backend.seen[1] == [{"role": "user", "content": "two"}]


async def test_http_backend_talks_to_the_server(start, engine):
    engine.script = lambda ids, params: answer(params, ["Hé", "llo"])
    client = await start(engine, api_keys=("k",), keep_alive_interval=0.01)
    backend = HttpBackend(str(client.make_url("/v1/")), model=None, api_key="k")
    messages = [{"role": "user", "content": "hi"}]
    pieces = await asyncio.to_thread(lambda: list(backend.chat(messages, {"max_tokens": 5})))
    assert "".join(pieces) == "Héllo"
    assert engine.requests[0].params.max_tokens == 5


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
async def test_http_backend_reads_events_of_several_lines(line_end):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        event = json.dumps({"choices": [{"delta": {"content": "Hé"}}]}, indent=1).split("\n")
        lines = [": hi", "", "event: x", *(f"data: {line}" for line in event), ""]
        body = line_end.join([*lines, "data:[DONE]", "", ""])
        writer.write(f"HTTP/1.0 200 OK\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        backend = HttpBackend(f"http://127.0.0.1:{port}", model="m", api_key=None)
        assert await asyncio.to_thread(lambda: list(backend.chat([], {}))) == ["Hé"]


async def test_http_backend_cancels_by_closing(start, engine):
    engine.script = lambda ids, params: [FakeDelta("a"), 3600.0]
    client = await start(engine)
    backend = HttpBackend(str(client.make_url("/")), model="fake-model", api_key=None)

    def take_one():
        answer = backend.chat([{"role": "user", "content": "hi"}], {})
        piece = next(answer)
        answer.close()
        return piece

    assert await asyncio.to_thread(take_one) == "a"
    while not engine.requests[0].stream.cancelled:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([FakeDelta("", finish_reason="error", error="early")], "early"),
        ([FakeDelta("a"), FakeDelta("", finish_reason="error", error="late")], "late"),
    ],
)
async def test_http_backend_reports_errors(start, engine, script, message):
    engine.script = lambda ids, params: script
    client = await start(engine)
    backend = HttpBackend(str(client.make_url("/")), model=None, api_key=None)
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(RuntimeError, match=message):
        await asyncio.to_thread(lambda: list(backend.chat(chat, {})))


@pytest.mark.parametrize("model", ["m", None])
def test_http_backend_without_a_server(model):
    backend = HttpBackend("127.0.0.1:9", model=model, api_key=None)
    refused = r"at 127\.0\.0\.1:9: Connection refused$"
    with pytest.raises(RuntimeError, match=refused):
        list(backend.chat([], {}))
    with pytest.raises(RuntimeError, match=refused), backend:
        raise AssertionError("it was entered")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"hello\r\n\r\n", "does not answer in HTTP"),
        (b"", "cannot reach the server"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "/v1/models lists no model; name one"),
        (b"HTTP/1.0 404 Not Found\r\n\r\nno", "the server answered 404 Not Found"),
        (
            b'HTTP/1.0 401 No\r\n\r\n{"error": {"message": "a key"}}',
            r"a key \(here --api-key KEY, or MINIINFER_API_KEY\)",
        ),
    ],
)
async def test_chat_tells_of_a_wrong_server_before_the_first_message(answer, message):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    def enter(url):
        with HttpBackend(url, model=None, api_key=None):
            raise AssertionError("it was entered")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(RuntimeError, match=message):
            await asyncio.to_thread(enter, url)


def test_http_backend_refuses_what_is_no_url():
    with pytest.raises(UsageError):
        HttpBackend("http://", model=None, api_key=None)


def test_local_backend_cancels_by_closing(monkeypatch):
    engine = FakeEngine(lambda ids, params: [FakeDelta("a"), 3600.0])
    monkeypatch.setattr("miniinfer.AsyncLLM", SimpleNamespace(from_args=lambda args: engine))
    with LocalBackend(None) as backend:
        answer = backend.complete("hi", {"temperature": 0.0})
        assert next(answer) == "a"
        answer.close()
    assert engine.requests[0].stream.cancelled
    assert engine.requests[0].params.max_tokens == engine.max_model_len - 2
    assert engine.closed


def test_local_backend_closes_under_a_running_request(monkeypatch):
    engine = FakeEngine(lambda ids, params: [FakeDelta("a"), 3600.0])
    monkeypatch.setattr("miniinfer.AsyncLLM", SimpleNamespace(from_args=lambda args: engine))
    with LocalBackend(None) as backend:
        answer = backend.complete("hi", {"max_tokens": 3})
        next(answer)
    assert engine.requests[0].stream.cancelled
    assert engine.requests[0].params.max_tokens == 3
    assert list(answer) == []


def test_local_backend_refuses_a_prompt_that_fills_the_context(monkeypatch):
    engine = FakeEngine(max_model_len=4)
    monkeypatch.setattr("miniinfer.AsyncLLM", SimpleNamespace(from_args=lambda args: engine))
    with LocalBackend(None) as backend, pytest.raises(ValueError, match="4 tokens"):
        list(backend.complete("four", {}))
