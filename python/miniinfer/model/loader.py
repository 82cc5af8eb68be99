"""Loading a model from a directory or a GGUF file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ..gguf_file import GGUFFile
from .config import ModelConfig
from .errors import ModelLoadError
from .gguf_config import gguf_model_config
from .hf_config import read_hf_config
from .llama import LlamaModel, WeightSlot
from .weights import GGUFWeights, SafetensorsWeights, WeightSource

__all__ = ["Progress", "load_model", "read_model_config"]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor, from one thread at a time."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of the model at `path`, without its weights.

    Raises as `load_model` does.
    """
    return _open(Path(path))[0]


def load_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | bool | None = None,
    *,
    max_positions: int | None = None,
) -> LlamaModel:
    """Load a model.

    `path`: a directory with config.json and safetensors files, or a GGUF file. `dtype`: of the
    weights; by default float32 on a CPU, and else the type they were saved in (bfloat16 for GGUF).
    `progress`: a function to call, True or False for a bar on stderr or none; by default a bar if
    stderr is a terminal and loading takes more than a second. `max_positions`: length of the rotary
    table, by default the model's own.

    Raises `ModelLoadError` or `GGUFError` (both `ValueError`s), with one line that names the file,
    the setting or tensor and the value.
    """
    config, source = _open(Path(path))
    device = torch.device(device)
    dtype = _default_dtype(config, source, device) if dtype is None else dtype
    try:
        # Without storage first: no memory is taken for a configuration that the weights do not fit.
        _check_tensors(LlamaModel(config, dtype, "meta", max_positions=1).weight_slots(), source)
        model = LlamaModel(config, dtype, device, max_positions=max_positions)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelLoadError(f"{path}: no room for the weights on {device}: {reason}") from error
    slots = model.weight_slots()
    with _reporter(progress) as report:
        _fill(slots, source, report)
    if isinstance(source, GGUFWeights):
        factors = source.rotary_factors()
        if factors is not None:
            model.set_rotary_factors(factors)
    return model


def _open(path: Path) -> tuple[ModelConfig, WeightSource]:
    if path.is_dir():
        return read_hf_config(path), SafetensorsWeights(path)
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file or directory")
    file = GGUFFile(path)
    config = gguf_model_config(file)
    return config, GGUFWeights(file, config)


def _default_dtype(config: ModelConfig, source: WeightSource, device: torch.device) -> torch.dtype:
    # Few CPUs multiply in half precision faster than in float32, and many far slower.
    if device.type == "cpu":
        return torch.float32
    name = config.torch_dtype or "bfloat16"
    if name not in _DTYPES:
        raise ModelLoadError(
            f"{source.path}: weights of type {name!r} are not supported "
            f"(supported: {', '.join(_DTYPES)})"
        )
    return _DTYPES[name]


def _check_tensors(slots: dict[str, WeightSlot], source: WeightSource) -> None:
    """Every tensor must be there and fit; others, like old rotary buffers, are not looked at."""
    names = source.names()
    for name, slot in slots.items():
        if name not in names:
            hint = " and tie_word_embeddings is false" if name == "lm_head.weight" else ""
            raise ModelLoadError(f"{source.path}: tensor {name!r} is missing{hint}")
        shape = source.shape(name)
        if shape != slot.shape:
            raise ModelLoadError(
                f"{source.path}: tensor {name!r} has the shape {list(shape)}, "
                f"the configuration asks for {list(slot.shape)}"
            )


def _fill(slots: dict[str, WeightSlot], source: WeightSource, report: Progress) -> None:
    total = sum(slot.target.nbytes for slot in slots.values())
    done = 0
    with ThreadPoolExecutor(source.threads) as pool:
        # The largest first, so that no thread is left alone with it at the end.
        ordered = sorted(slots.items(), key=lambda item: -item[1].target.nbytes)
        jobs = [pool.submit(source.read, name, slot.target) for name, slot in ordered]
        try:
            for job, (_, slot) in zip(jobs, ordered, strict=True):
                job.result()
                done += slot.target.nbytes
                report(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _reporter(progress: Progress | bool | None) -> Iterator[Progress]:
    if callable(progress):
        yield progress
        return
    from tqdm import tqdm

    is_hidden = not (sys.stderr.isatty() if progress is None else progress)
    with tqdm(
        desc="loading weights",
        unit="B",
        unit_scale=True,
        delay=1.0 if progress is None else 0.0,
        disable=is_hidden,
        leave=False,
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
