"""Folders of sockets: who removes them, and when."""

import subprocess
import sys
from pathlib import Path

import pytest

import miniinfer
from miniinfer.socket_folder import SocketFolder

OWNER = """
import sys
from miniinfer.socket_folder import SocketFolder
print(SocketFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(Path(miniinfer.__file__).parents[1]))
    return tmp_path


def test_that_of_a_killed_owner_goes_with_the_next_start(temporary: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().decode().strip())
        assert path.parent == temporary
        (path / "0-0.in").touch()
        while_it_lives = SocketFolder()
        assert path.is_dir()
        owner.kill()
    assert path.is_dir()
    after = SocketFolder()
    assert not path.exists()
    assert while_it_lives.path.is_dir()
    assert after.path.stat().st_mode & 0o777 == 0o700
    for folder in (while_it_lives, after):
        folder.remove()
    assert list(temporary.iterdir()) == []


def test_what_is_not_its_own_is_left_alone(temporary: Path) -> None:
    being_made = temporary / "miniinfer-sockets-x"
    being_made.mkdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.touch()
    link = temporary / "miniinfer-sockets-link"
    link.mkdir()
    (link / "owner").symlink_to(elsewhere)
    SocketFolder().remove()
    assert sorted(path.name for path in temporary.iterdir()) == [
        "elsewhere",
        "miniinfer-sockets-link",
        "miniinfer-sockets-x",
    ]
