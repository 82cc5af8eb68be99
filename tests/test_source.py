"""What a model's name resolves to, and the one clear error when it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from miniinfer import fetch
from miniinfer.source import ModelSource, ModelSourceError, resolve_model


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_builtin(model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIINFER_CACHE", str(tmp_path))
    with fetch.builtin_path().open("wb") as file:
        file.truncate(fetch.BUILTIN.size)
    assert resolve_model(model) == ModelSource("gguf", fetch.builtin_path(), "smollm2")


@pytest.mark.usefixtures("no_hub")
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "org" / "name"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert resolve_model(str(directory)) == ModelSource("hf", directory, str(directory))
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    assert resolve_model(str(file)) == ModelSource("gguf", file, "tiny.Q8_0")
    # What is on disk goes before a hub repository of that name.
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").path == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/name").path == directory


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("", "'' is not a model"),
        ("a\0b", "is not a model"),
        ("absent", "absent: no such file or directory, and not a hub id org/name"),
        ("./absent.gguf", "no such file or directory, and not a hub id"),
        ("/absent/name", "no such file or directory, and not a hub id"),
        ("a/b/c", "no such file or directory, and not a hub id"),
        ("org/name:weights.bin", "no such file or directory, and not a hub id"),
        ("org/../name", "not a hub id"),
        ("https://host/org/name", "not a hub id"),
        ("x" * 5000, "cannot read x+: .*File name too long"),
    ],
)
def test_names_of_nothing(model: str, problem: str) -> None:
    with pytest.raises(ModelSourceError, match=problem) as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_directories_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"has no config\.json \(it is empty\)"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelSourceError, match="a model directory has"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelSourceError, match=r"name it: .*m\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04", b"FUGG\0\0"])
def test_files_that_are_no_gguf(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelSourceError, match="is not a GGUF file: it starts with"):
        resolve_model(str(file))


@pytest.mark.usefixtures("no_hub")
def test_what_is_neither_file_nor_directory() -> None:
    with pytest.raises(ModelSourceError, match="neither a file nor a directory"):
        resolve_model("/dev/null")


class Hub:
    """Stands in for `snapshot_download`: what is cached, what a download brings, and the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cached = False
        self.download: Callable[[], None] = lambda: None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append({"repository": repository, **options})
        if options["local_files_only"]:
            if not self.cached:
                raise errors.LocalEntryNotFoundError("not cached")
        else:
            self.download()
        return str(self.folder)

    @property
    def downloads(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if not call["local_files_only"]]

    def put(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    hub = Hub(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def test_cached_repository_needs_no_network(hub: Hub) -> None:
    hub.cached = True
    hub.put("config.json")
    hub.put("model.safetensors")
    assert resolve_model("org/name") == ModelSource("hf", hub.folder, "org/name")
    assert hub.downloads == []


def test_half_cached_repository_is_downloaded(hub: Hub) -> None:
    hub.cached = True
    hub.put("config.json")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.put("model.safetensors.index.json", json.dumps(index))
    hub.put("model-1.safetensors")
    hub.download = lambda: hub.put("model-2.safetensors")
    resolve_model("org/name")
    assert len(hub.downloads) == 1
    resolve_model("org/name")
    assert len(hub.downloads) == 1


def test_download_takes_no_pickles(hub: Hub) -> None:
    hub.download = lambda: hub.put("config.json")
    assert resolve_model("org/na.me-1", revision="v2").path == hub.folder
    (call,) = hub.downloads
    assert call["revision"] == "v2"
    files = ["config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"]
    unwanted = ["a.bin", "a.pth", "a.pt", "a.py", "original/a.safetensors", "a.gguf", "a.msgpack"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files + unwanted,
        allow_patterns=call["allow_patterns"],
        ignore_patterns=call["ignore_patterns"],
    )
    assert list(kept) == files


def test_gguf_file_in_a_repository(hub: Hub) -> None:
    hub.download = lambda: hub.put("m.gguf", "GGUF")
    expected = ModelSource("gguf", hub.folder / "m.gguf", "org/name:m.gguf")
    assert resolve_model("org/name:m.gguf") == expected
    assert hub.downloads[0]["allow_patterns"] == ["m.gguf"]
    hub.cached = True
    assert resolve_model("org/name:m.gguf") == expected
    assert len(hub.downloads) == 1
    with pytest.raises(ModelSourceError, match=r"has no file other\.gguf"):
        resolve_model("org/name:other.gguf")


def test_repository_of_something_else(hub: Hub) -> None:
    with pytest.raises(ModelSourceError, match=r"has no config\.json .*org/name:file\.gguf"):
        resolve_model("org/name")


def hub_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "details\nmore")
    return error


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ConnectionError("name not known\nmore"), "downloading it failed: name not known$"),
        (OSError(), "downloading it failed: OSError$"),
        (hub_error(errors.RepositoryNotFoundError), "and no such repository on the hub"),
        (hub_error(errors.GatedRepoError), "access to this hub repository is restricted"),
        (hub_error(errors.RevisionNotFoundError), "has no revision 'v1'"),
    ],
)
def test_download_failures(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    def fail() -> None:
        raise error

    # As for a user who may download; `hub` stands where the network would be.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.download = fail
    with pytest.raises(ModelSourceError, match=problem) as caught:
        resolve_model("org/name", revision="v1")
    assert str(caught.value).startswith("org/name")
    assert "\n" not in str(caught.value)


def test_offline_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for model in ("org/name", "org/name:m.gguf"):
        with pytest.raises(ModelSourceError, match="HF_HUB_OFFLINE forbids downloading it"):
            resolve_model(model)
