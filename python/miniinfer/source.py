"""From what the user names as a model to files on disk.

A model is the built-in one, a directory in the layout of the Hugging Face hub, a GGUF file, or a
repository on the hub (`org/name`, or `org/name:file.gguf` for one GGUF file in it). A repository
that is in the local cache already is used from there, without a look at the network.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["BUILTIN_ALIASES", "ModelSource", "ModelSourceError", "resolve_model"]

BUILTIN_ALIASES = ("smollm2",)
"""Names of the built-in model; no name at all means it too."""

# `.bin` and `.pth` weights are pickles, which run code when loaded: they are never downloaded.
_NEEDED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
_UNNEEDED_FILES = ["original/*", "onnx/*", "consolidated*", "*.bin.index.json"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_MAGIC = b"GGUF"


class ModelSourceError(ValueError):
    """What was named is not a model, or cannot be had."""


@dataclass(frozen=True)
class ModelSource:
    """A model on disk."""

    kind: Literal["gguf", "hf"]
    """`gguf`: `path` is a GGUF file. `hf`: `path` is a directory with a `config.json`."""
    path: Path
    name: str
    """What to call it: as the user did, or its file's name."""


def resolve_model(model: str | None = None, revision: str | None = None) -> ModelSource:
    """Find the files of `model`, downloading them if they are not on this machine.

    Args:
        model: `None` or "smollm2" for the built-in model; a path; or a hub id.
        revision: branch, tag or commit, for a hub id only.

    Raises:
        ModelSourceError: there is no such model, or it is not one, or it cannot be downloaded.
        FetchError: the built-in model cannot be downloaded.
    """
    if model is None or model in BUILTIN_ALIASES:
        from .fetch import ensure_builtin

        return ModelSource("gguf", ensure_builtin(), BUILTIN_ALIASES[0])
    if not model or "\0" in model:
        raise ModelSourceError(f"{model!r} is not a model: give a path, or a hub id org/name")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _directory(path, model)
        if path.exists():
            return _gguf_file(path)
    except OSError as error:
        raise ModelSourceError(f"cannot read {model}: {error}") from None
    repository, colon, file = model.partition(":")
    if not _HUB_ID.fullmatch(repository) or (colon and not file.endswith(".gguf")):
        raise ModelSourceError(
            f"{model}: no such file or directory, and not a hub id org/name or org/name:file.gguf"
        )
    if colon:
        return _hub_file(repository, file, revision)
    return _hub_repository(repository, revision)


def _directory(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("hf", path, name)
    gguf_files = sorted(file.name for file in path.glob("*.gguf"))
    if gguf_files:
        hint = f"to use a GGUF file, name it: {path / gguf_files[0]}"
    elif not any(path.iterdir()):
        hint = "it is empty"
    else:
        hint = "a model directory has config.json, a tokenizer and *.safetensors"
    raise ModelSourceError(f"{name}: the directory has no config.json ({hint})")


def _gguf_file(path: Path, name: str | None = None) -> ModelSource:
    if not path.is_file():
        raise ModelSourceError(f"{path} is neither a file nor a directory")
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ModelSourceError(
            f"{path} is not a GGUF file: it starts with {start!r}, not {_MAGIC!r} (a model is a"
            " .gguf file, a directory with config.json, or a hub id org/name)"
        )
    return ModelSource("gguf", path, name or path.stem)


def _hub_repository(repository: str, revision: str | None) -> ModelSource:
    path = _snapshot(repository, revision, _NEEDED_FILES, _is_complete)
    if not (path / "config.json").is_file():
        raise ModelSourceError(
            f"{repository}: the hub repository has no config.json (for a GGUF file in it, name the"
            f" file: {repository}:file.gguf)"
        )
    return ModelSource("hf", path, repository)


def _hub_file(repository: str, file: str, revision: str | None) -> ModelSource:
    folder = _snapshot(repository, revision, [file], lambda cached: (cached / file).is_file())
    if not (folder / file).is_file():
        raise ModelSourceError(f"{repository}: the hub repository has no file {file}")
    return _gguf_file(folder / file, f"{repository}:{file}")


def _snapshot(
    repository: str,
    revision: str | None,
    patterns: list[str],
    is_usable: Callable[[Path], bool],
) -> Path:
    """Return the folder of a repository's files: from the cache if usable, else from the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def find(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_UNNEEDED_FILES,
                local_files_only=local_files_only,
            )
        )

    with contextlib.suppress(LocalEntryNotFoundError, OSError):
        cached = find(local_files_only=True)
        if is_usable(cached):
            return cached
    try:
        return find(local_files_only=False)
    except Exception as error:  # The hub's client lets its HTTP library's exceptions through.
        raise ModelSourceError(_hub_problem(error, repository, revision)) from error


def _hub_problem(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name}: access to this hub repository is restricted: ask for it, then log in"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: the hub repository has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name}: no such file or directory, and no such repository on the hub"
    at = f" at revision {revision}" if revision else ""
    absent = f"{name}{at}: no such file or directory, and not in the local hub cache"
    if constants.HF_HUB_OFFLINE:
        return f"{absent}; HF_HUB_OFFLINE forbids downloading it"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{absent}; downloading it failed: {reason}"


def _is_complete(snapshot: Path) -> bool:
    """Whether a cached snapshot holds a whole model: an interrupted download leaves part of one."""
    if not (snapshot / "config.json").is_file():
        return False
    try:
        index = json.loads((snapshot / "model.safetensors.index.json").read_text("utf-8"))
        shards = set(index["weight_map"].values())
    except FileNotFoundError:
        return any(snapshot.glob("*.safetensors"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return False
    return all((snapshot / shard).is_file() for shard in shards)
