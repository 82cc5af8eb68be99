"""What the package is from outside: its names, what importing it costs, the files it brings."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import pytest

import miniinfer
from miniinfer import errors

PACKAGE = Path(miniinfer.__file__).parent

HEAVY = ("torch", "aiohttp", "transformers", "numpy", "tokenizers", "gguf", "huggingface_hub")


def run(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter on this package; its standard output."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 50
    return found


def imports_core(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            continue
        if any("_core" in name.split(".") for name in names):
            return True
    return False


def test_few_files_use_the_compiled_module() -> None:
    # `errors` and the package itself pass its exceptions and version on; both load it lazily.
    assert {str(path.relative_to(PACKAGE)) for path in modules() if imports_core(path)} == {
        "async_llm.py",
        "bench/fake_model.py",
        "bursts.py",
        "cpu/attention.py",
        "cpu/linear.py",
        "cpu/model.py",
        "cpu/ops.py",
        "cpu/sampling.py",
        "engine.py",
        "engine_link.py",
        "engine_process.py",
        "errors.py",
        "execution/steps.py",
        "llm_engine.py",
        "outputs.py",
        "parsing.py",
        "remote_llm.py",
        "speculation.py",
        "step.py",
        "streams.py",
        "submission.py",
    }


class TestNames:
    def test_all_are_there_and_from_here(self) -> None:
        assert dir(miniinfer) == sorted(miniinfer.__all__)
        assert len(set(miniinfer.__all__)) == len(miniinfer.__all__)
        for name in miniinfer.__all__:
            assert getattr(miniinfer, name) is not None

    def test_they_are_these(self) -> None:
        assert sorted(miniinfer.__all__) == [
            "AsyncLLM",
            "CompiledGrammar",
            "CompletionOutput",
            "EngineArgs",
            "EngineDeadError",
            "LLM",
            "LLMEngine",
            "Logprob",
            "ParameterError",
            "RequestError",
            "RequestOutput",
            "RequestOutputKind",
            "SamplingParams",
            "Stream",
            "StructuredOutputsParams",
            "__version__",
        ]

    def test_an_unknown_one(self) -> None:
        for module in (miniinfer, errors):
            with pytest.raises(AttributeError, match="no_such_name"):
                _ = module.no_such_name

    def test_version_is_the_distributions(self) -> None:
        assert miniinfer.__version__ == importlib.metadata.version("miniinfer")

    def test_public_things_are_documented(self) -> None:
        for name in miniinfer.__all__:
            if name != "__version__":
                assert getattr(miniinfer, name).__doc__, name


def error_tree() -> dict[str, str]:
    """Name and base class of each exception, as the module's own text says."""
    tree, base = {}, ""
    lines = (errors.__doc__ or "").split("\n\n")[1].splitlines()
    for line in lines:
        name = line.split()[0]
        if line.startswith(" "):
            tree[name] = base
        else:
            base = name
    return tree


def test_the_tree_of_errors_is_true() -> None:
    tree = error_tree()
    assert set(tree) == set(errors.__all__)
    for name, base in tree.items():
        kind = getattr(errors, name)
        assert issubclass(kind, Exception)
        assert base in {parent.__name__ for parent in kind.__mro__}, name


def test_no_error_is_missing_from_the_tree() -> None:
    """Every exception class that a module outside the server and the command line defines."""
    defined = set()
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in ("server", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                defined.add(node.name)
    assert defined <= set(errors.__all__)
    assert defined


class TestImport:
    def test_costs_nothing_heavy(self) -> None:
        code = f"import sys, miniinfer; print([n for n in {HEAVY} if n in sys.modules])"
        assert run(code).strip() == "[]"

    def test_nor_does_the_help_of_the_command_line(self) -> None:
        code = (
            "import sys\nfrom miniinfer.cli import main\n"
            "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
            f"print([n for n in {HEAVY} if n in sys.modules])"
        )
        assert run(code).splitlines()[-1] == "[]"

    def test_reaches_for_no_network(self) -> None:
        names = [
            ".".join(("miniinfer", *path.relative_to(PACKAGE).with_suffix("").parts))
            for path in modules()
            if path.name not in ("__main__.py", "__init__.py") and "kernels" not in path.parts
        ]
        code = (
            "import importlib, socket, sys\n"
            "def refuse(*given, **named): raise AssertionError('a socket at import')\n"
            "for name in ('connect', 'connect_ex', 'sendto'):\n"
            "    setattr(socket.socket, name, refuse)\n"
            "socket.getaddrinfo = socket.create_connection = refuse\n"
            "for name in sys.argv[1:]: importlib.import_module(name)\n"
            "print(len(sys.argv) - 1)"
        )
        assert int(run(code, *names)) == len(names) > 40


class TestFiles:
    @pytest.mark.parametrize(
        "name", ["py.typed", "_core.pyi", "kernels/__init__.py", "kernels/_paged_attention.py"]
    )
    def test_come_with_the_package(self, name: str) -> None:
        file = importlib.resources.files("miniinfer") / name
        assert file.is_file()
        if name != "py.typed":
            assert file.read_text(encoding="utf-8")

    def test_every_public_kernel_can_be_imported(self) -> None:
        folder = PACKAGE / "kernels"
        names = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")]
        assert len(names) >= 5
        for name in names:
            importlib.import_module(f"miniinfer.kernels.{name}")

    def test_the_compiled_module_is_the_packages_own(self) -> None:
        from miniinfer import _core

        assert Path(_core.__file__ or "").parent == PACKAGE
        assert "abi3" in Path(_core.__file__ or "").name

    def test_the_stub_names_what_the_module_has(self) -> None:
        from miniinfer import _core

        tree = ast.parse((PACKAGE / "_core.pyi").read_text(encoding="utf-8"))
        classes = {
            node.name: {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            for node in tree.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        }
        assert {"Engine", "Delta", "Submission", "TokenLogprob"} <= set(classes)
        for name, members in classes.items():
            real = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
            assert {member for member in members if not member.startswith("_")} == real, name
