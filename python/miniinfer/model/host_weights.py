"""A GGUF model's weights in main memory, read without torch.

Importing torch takes seconds, and one core. So an engine has the weights read meanwhile by threads
that spend their time in numpy, without the GIL; torch then takes the arrays as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..gguf_file import GGUFFile
from .errors import ModelLoadError
from .fill import Progress, check_tensors, fill, reporter
from .gguf_config import gguf_model_config
from .gguf_weights import GGUFWeights
from .weight_layout import ModelWeights

if TYPE_CHECKING:
    from ..cpu.packing import Packing

__all__ = ["Floats", "HostWeights", "read_host_weights"]

Floats = npt.NDArray[np.float32]

# Where torch's own tensors begin. Elsewhere each vector of a matrix product would straddle two
# cache lines, and products may round otherwise.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weights as float32 arrays, laid out as the model uses them.

    With `packing`, the matrices are `QuantLinear`s.
    """

    weights: ModelWeights[Any]
    rotary_factors: Floats | None
    """[head_dim / 2]: divisors of the rotary frequencies, if the file has them."""
    packing: Packing | None = None


def read_host_weights(
    path: str | os.PathLike[str],
    progress: Progress | bool | None = None,
    *,
    threads: int = GGUFWeights.threads,
    packing: Packing | None = None,
) -> HostWeights:
    """Read a GGUF file's weights, dequantised to float32 or packed. Arguments as `load_model`'s.

    Raises `ModelLoadError` or `GGUFError`.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file or directory")
    file = GGUFFile(path)
    config = gguf_model_config(file)
    source = GGUFWeights(file, config)
    factors = source.rotary_factors()
    if packing is not None:
        from ..cpu.weights import pack_weights

        with reporter(progress) as report:
            return HostWeights(pack_weights(config, source, packing, report), factors, packing)
    # Without storage first: no memory is taken for a configuration that the weights do not fit.
    check_tensors(ModelWeights.allocate(config, _without_storage).slots(), source)
    weights = _allocate(path, lambda: ModelWeights.allocate(config, _empty))
    with reporter(progress) as report:
        fill(weights.slots(), source.read_array, threads, report)
    return HostWeights(weights, factors)


def _allocate(path: Path, make: Callable[[], ModelWeights[Floats]]) -> ModelWeights[Floats]:
    try:
        return make()
    except MemoryError as error:
        raise ModelLoadError(f"{path}: no room for the weights on cpu: {error}") from error


def _without_storage(shape: tuple[int, ...]) -> Floats:
    return np.broadcast_to(np.float32(0), shape)


def _empty(shape: tuple[int, ...]) -> Floats:
    size = 4 * prod(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(np.float32).reshape(shape)
