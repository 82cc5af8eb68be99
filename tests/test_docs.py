"""The documents against the code: what they name exists, what they show runs."""

import ast
import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import miniinfer
import readme_help

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (".", "kernels", "examples", "benches")
    for path in (ROOT / folder).glob("*.md")
)
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()

# Where a path in a document may start.
BASES = (".", "rust/core/src", "python/miniinfer")


def fenced(text: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def section(text: str, heading: str) -> str:
    """What stands between a heading and the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
    assert match, f"no section {heading!r}"
    return match[1]


def first_cells(text: str) -> list[str]:
    """The names in backticks of each table row's first cell."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_documents_are_found():
    assert {"README.md", "ARCHITECTURE.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {
        str(path) for path in DOCUMENTS
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / document.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_a_document_speaks_of_the_project_alone(document):
    text = (ROOT / document).read_text()
    for pattern in (r"\{\{", r"/work/", r"/tmp/", r"\W#\d+", r"\b(?:TODO|FIXME|XXX|TBD)\b"):
        assert not re.findall(pattern, text), pattern


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_are_named_exist(document):
    text = (ROOT / document).read_text()
    for name in re.findall(r"`([\w.-]+/[\w./-]*\w\.(?:rs|py|pyi|toml|md))`", text):
        assert any((ROOT / base / name).is_file() for base in BASES), name


def test_functions_that_are_named_exist():
    pairs = re.findall(r"`([\w./-]+\.(?:rs|py))`\s+\((`[^)]*`)\)", ARCHITECTURE)
    assert len(pairs) > 20
    for name, functions in pairs:
        source = (ROOT / name).read_text()
        for function in re.findall(r"`(\w+)`", functions):
            declared = rf"\b(?:fn|def|class|struct) {function}\b|^{function}\b"
            assert re.search(declared, source, re.M), f"{function} is not in {name}"


def module_lists() -> dict[str, set[str]]:
    """The files that ARCHITECTURE.md lists, by their folder."""
    lists = {}
    for folder, body in re.findall(
        r"^### `([\w/]+)`\n(.*?)(?=^##|\Z)", section(ARCHITECTURE, "## Modules"), re.M | re.S
    ):
        heads = re.findall(r"^- ((?:`[^`]+`,?\s*)+):", body, re.M)
        lists[folder] = {name for head in heads for name in re.findall(r"`([^`]+)`", head)}
    return lists


def is_expected(path: Path) -> bool:
    """Whether a file needs a line: package and module heads say what their folder says."""
    return path.suffix in (".rs", ".py", ".pyi") and path.name not in ("__init__.py", "mod.rs")


@pytest.mark.parametrize("folder", sorted(module_lists()))
def test_every_module_has_its_line_and_every_line_its_module(folder):
    listed = module_lists()[folder] - {"__init__.py"}
    files = {path.name for path in (ROOT / folder).iterdir() if is_expected(path)}
    if folder == "tests":
        assert "test_*.py" in listed
        listed.discard("test_*.py")
        files = {name for name in files if not name.startswith("test_")}
    assert listed == files


def test_every_folder_of_modules_has_its_list():
    folders = {
        str(path.parent.relative_to(ROOT))
        for source in ("rust", "python")
        for suffix in ("rs", "py")
        for path in (ROOT / source).rglob(f"*.{suffix}")
        if "kernels" not in path.parts
    }
    assert folders <= set(module_lists())


def test_the_arrays_are_those_of_the_core():
    source = (ROOT / "rust/core/src/arrays.rs").read_text()
    body = source[source.rindex("step_arrays! {") :]
    types = {"i32": "int32", "i64": "int64", "f32": "float32"}
    declared = [
        (name, types[kind]) for name, kind in re.findall(r"^    (\w+): (\w+), \|", body, re.M)
    ]
    table = section(ARCHITECTURE, "## The arrays of a step")
    assert re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.M) == declared
    assert len(declared) > 10


def test_the_routes_are_those_of_the_server():
    import asyncio

    from miniinfer.server.app import make_app
    from miniinfer.server.config import ServerConfig

    async def routes() -> set[str]:
        app = make_app(asyncio.get_running_loop().create_future(), ServerConfig())
        paths = [(route.method, route.resource) for route in app.router.routes()]
        return {
            f"{method} {resource.canonical}"
            for method, resource in paths
            if resource is not None and method != "HEAD"
        }

    table = section(README, "## The server").partition("\n\n")[0]
    listed = {name for name in first_cells(table) if " /" in name}
    assert listed == asyncio.run(routes())


def test_every_parameter_of_the_routes_is_named():
    from miniinfer.server.protocol import ChatRequest, CompletionRequest, GenerateRequest

    text = section(README, "## The server")
    for body in (ChatRequest, CompletionRequest, GenerateRequest):
        for name in body.__struct_fields__:
            assert f"`{name}`" in text, f"{body.__name__}.{name}"


def test_the_public_names_are_named():
    text = section(README, "## Python")
    named = set(re.findall(r"`(\w+)`", text))
    public = {name for name in miniinfer.__all__ if not name.startswith("_")}
    assert public <= named


def test_the_models_and_formats_are_those_that_load():
    from miniinfer.model.config import SUPPORTED_ARCHITECTURES
    from miniinfer.model.dequantize import _CONVERTERS

    text = section(README, "## What it runs")
    assert set(re.findall(r"`(\w+ForCausalLM)`", text)) == set(SUPPORTED_ARCHITECTURES)
    assert set(re.findall(r"\b(?:B?F(?:16|32)|Q\d_[01K])\b", text)) == {
        kind.name for kind in _CONVERTERS
    }


def test_the_kernels_are_those_of_the_package():
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    operations = {name for name in names if not name.endswith("_reference")}
    assert set(first_cells((ROOT / "kernels/README.md").read_text())) == operations


def test_the_changelog_has_this_version():
    assert f"## {miniinfer.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_jobs_of_make_exist(document):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    text = (ROOT / document).read_text()
    shell = "".join(fenced(text, "sh"))
    for name in re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^make ([a-z-]+)", shell, re.M):
        assert name in targets, name


def commands() -> list[str]:
    """The `miniinfer` command lines in all documents."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        found += re.findall(r"^miniinfer .*", "".join(fenced(text, "sh")), re.M)
        found += re.findall(r"`(miniinfer [a-z]+(?: [^`]*)?)`", text)
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_understood(command):
    from miniinfer.cli import build_parser

    words = shlex.split(command)[1:]
    if words[-1] == "--help":
        with pytest.raises(SystemExit, match=r"^0$"):
            build_parser().parse_args(words)
    else:
        build_parser().parse_args(words)


def test_the_help_is_what_the_commands_print():
    shown = readme_help.shown(README)
    assert {"--help", "serve --help"} <= set(shown)
    for arguments, output in shown.items():
        # Versions of Python wrap the usage differently.
        now = readme_help.help_text(arguments.split())
        assert output.split() == now.split(), "run: python tests/readme_help.py"


def snippets(using: str) -> list[str]:
    """The README's Python that has `using` in it."""
    found = [code for code in fenced(README, "python") if using in code]
    assert found, f"no snippet with {using!r}"
    return found


def test_every_snippet_of_python_is_run_here():
    counts = [len(snippets(f"from {name} import")) for name in ("openai", "anthropic", "miniinfer")]
    assert len(fenced(README, "python")) == sum(counts)


def subject(code: str) -> str:
    """The class that a snippet shows."""
    return next(name for name in ("AsyncLLM", "LLMEngine", "LLM") if name in code)


@pytest.mark.parametrize("code", snippets("from miniinfer"), ids=subject)
def test_the_library_snippets_run(code, builtin_gguf, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert len(printed) > 20
    if "capital of France" in code or "Seine" in code:
        assert "Paris" in printed


@pytest.fixture(scope="module")
def server(builtin_gguf, tmp_path_factory) -> Iterator[str]:
    """The address of `miniinfer serve` with the built-in model."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "miniinfer.cli", "serve", "--port", "0"]
    with log.open("w") as errors, contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [*command, "--max-model-len", "512", "--num-kv-blocks", "64"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        )
        stack.callback(process.send_signal, signal.SIGTERM)
        address = None
        for line in process.stdout:
            if line.startswith("listens"):
                address = line.split()[1]
            if line.strip().startswith("curl"):
                break
        assert address, log.read_text()
        yield address


def run_against(server: str, command: list[str]) -> str:
    """What a command prints, with the README's address made the server's."""
    here = [argument.replace("http://127.0.0.1:8000", server) for argument in command]
    assert here != command, "it does not use the address of the README's server"
    result = subprocess.run(here, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_snippets_of_clients_run(server, client):
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    printed = [run_against(server, [sys.executable, "-c", c]) for c in snippets(f"from {client}")]
    assert all(text.strip() for text in printed)
    if client == "openai":
        assert any(re.fullmatch(r"roll (6|20)\n", text) for text in printed)
        assert any("Paris" in text for text in printed)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_snippets_run(server):
    found = [code for code in fenced(README, "sh") if code.startswith("curl ")]
    assert found
    for code in found:
        lines = run_against(server, ["bash", "-c", code]).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
