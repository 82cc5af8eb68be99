"""Loading a model from a directory or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..gguf_file import GGUFFile
from .config import ModelConfig
from .errors import ModelLoadError
from .fill import Progress, check_tensors, fill, reporter
from .gguf_config import gguf_model_config
from .gguf_weights import GGUFWeights
from .hf_config import read_hf_config
from .host_weights import Floats, HostWeights, read_host_weights
from .kv_scales import read_kv_scales
from .llama import LlamaModel
from .random_weights import RandomWeights
from .read_config import read_model_config
from .weight_layout import ModelWeights
from .weights import SafetensorsWeights, WeightSource

if TYPE_CHECKING:
    from ..cpu.packing import Packing
    from ..parallel.shard import Shard

__all__ = ["Progress", "load_model"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | bool | None = None,
    *,
    max_positions: int | None = None,
    host_weights: HostWeights | None = None,
    packing: Packing | None = None,
    shard: Shard | None = None,
    random_weights: bool = False,
) -> LlamaModel:
    """Load a model.

    `path`: a directory with config.json and safetensors files, or a GGUF file. `dtype`: of the
    weights; by default float32 on a CPU, and else the type they were saved in (bfloat16 for GGUF).
    `progress`: a function to call, True or False for a bar on stderr or none; by default a bar if
    stderr is a terminal and loading takes more than a second. `max_positions`: length of the rotary
    table, by default the model's own. `host_weights`: the weights, if they have been read before.
    `packing`: run on the CPU kernels, with weights packed like that. `shard`: load that part of it
    alone, as a `ShardedLlamaModel`; the two exclude each other. `random_weights`: of the files,
    only the configuration is read; see `RandomWeights`.

    Raises `ModelLoadError` or `GGUFError` (both `ValueError`s), with one line that names the file,
    the setting or tensor and the value.
    """
    path, device = Path(path), torch.device(device)
    if shard is not None:
        return _load_shard(path, shard, dtype, device, progress, max_positions, random_weights)
    if packing is not None:
        random = RandomWeights(read_model_config(path), path) if random_weights else None
        return _load_packed(path, packing, progress, max_positions, host_weights, random)
    can_be_host = dtype in (None, torch.float32) and device.type == "cpu" and not random_weights
    if host_weights is None and can_be_host:
        host_weights = None if path.is_dir() else read_host_weights(path, progress)
    kv_scales = None
    if host_weights is None:
        config, source = _open(path, random_weights)
        kv_scales = read_kv_scales(config, source)
        dtype = _default_dtype(config, path, device) if dtype is None else dtype
        weights = _read(config, source, dtype, device, progress)
        factors = source.rotary_factors() if isinstance(source, GGUFWeights) else None
    else:
        config = host_weights.weights.config
        dtype = _default_dtype(config, path, device) if dtype is None else dtype
        weights = _to_device(host_weights.weights, path, dtype, device)
        factors = host_weights.rotary_factors
    with _room_for_weights(path, device):
        model = LlamaModel(config, dtype, device, max_positions=max_positions, weights=weights)
        if factors is not None:
            model.set_rotary_factors(torch.from_numpy(factors))
    model.kv_scales = kv_scales
    return model


def _load_shard(
    path: Path,
    shard: Shard,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress | bool | None,
    max_positions: int | None,
    random_weights: bool,
) -> LlamaModel:
    from ..parallel.model import ShardedLlamaModel
    from ..parallel.weights import ShardedWeights

    whole, source = _open(path, random_weights)
    dtype = _default_dtype(whole, path, device) if dtype is None else dtype
    # The whole first: a part of a tensor that does not fit the configuration might fit by chance.
    check_tensors(_allocate(whole, dtype, torch.device("meta")).slots(), source)
    rows = shard.vocabulary(whole.vocab_size)
    head_rows, config = rows.stop - rows.start, shard.config(whole)
    parts = ShardedWeights(source, whole, shard)
    weights = _read(config, parts, dtype, device, progress, head_rows)
    with _room_for_weights(path, device):
        model = ShardedLlamaModel(
            config, shard, dtype, device, max_positions=max_positions, weights=weights
        )
        model.kv_scales = read_kv_scales(whole, source)
        factors = source.rotary_factors() if isinstance(source, GGUFWeights) else None
        if factors is not None:
            model.set_rotary_factors(torch.from_numpy(factors))
    return model


def _load_packed(
    path: Path,
    packing: Packing,
    progress: Progress | bool | None,
    max_positions: int | None,
    host_weights: HostWeights | None,
    random: RandomWeights | None,
) -> LlamaModel:
    from ..cpu.model import CpuLlamaModel
    from ..cpu.weights import pack_weights

    if host_weights is None and random is None and not path.is_dir():
        host_weights = read_host_weights(path, progress, packing=packing)
    if host_weights is None:
        config = read_model_config(path)
        source = SafetensorsWeights(path) if random is None else random
        with reporter(progress) as report:
            host_weights = HostWeights(pack_weights(config, source, packing, report), None, packing)

    def tensor(array: Any) -> Any:
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    weights = host_weights.weights.map(tensor)
    is_quantized = packing in ("stored", "int8", "int4")
    model = CpuLlamaModel(
        weights.config, weights, max_positions=max_positions, is_quantized=is_quantized
    )
    if host_weights.rotary_factors is not None:
        model.set_rotary_factors(torch.from_numpy(host_weights.rotary_factors))
    return model


def _open(path: Path, random_weights: bool) -> tuple[ModelConfig, WeightSource]:
    if random_weights:
        config = read_model_config(path)
        return config, RandomWeights(config, path)
    if path.is_dir():
        return read_hf_config(path), SafetensorsWeights(path)
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file or directory")
    file = GGUFFile(path)
    config = gguf_model_config(file)
    return config, GGUFWeights(file, config)


def _read(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | bool | None,
    head_rows: int | None = None,
) -> ModelWeights[Tensor]:
    # Without storage first: no memory is taken for a configuration that the weights do not fit.
    check_tensors(_allocate(config, dtype, torch.device("meta"), head_rows).slots(), source)
    with _room_for_weights(source.path, device):
        weights = _allocate(config, dtype, device, head_rows)
    with reporter(progress) as report:
        fill(weights.slots(), source.read, source.threads, report)
    return weights


def _allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, head_rows: int | None = None
) -> ModelWeights[Tensor]:
    return ModelWeights.allocate(
        config,
        lambda shape: torch.empty(shape, dtype=dtype, device=device),
        head_rows=head_rows,
    )


def _to_device(
    weights: ModelWeights[Floats], path: Path, dtype: torch.dtype, device: torch.device
) -> ModelWeights[Tensor]:
    """The same memory, if it is of that type and on that device already."""
    with _room_for_weights(path, device):
        return weights.map(lambda array: torch.from_numpy(array).to(device, dtype))


@contextmanager
def _room_for_weights(path: Path, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelLoadError(f"{path}: no room for the weights on {device}: {reason}") from error


def _default_dtype(config: ModelConfig, path: Path, device: torch.device) -> torch.dtype:
    # Few CPUs multiply in half precision faster than in float32, and many far slower.
    if device.type == "cpu":
        return torch.float32
    name = config.torch_dtype or "bfloat16"
    if name not in _DTYPES:
        raise ModelLoadError(
            f"{path}: weights of type {name!r} are not supported (supported: {', '.join(_DTYPES)})"
        )
    return _DTYPES[name]
