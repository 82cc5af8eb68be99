"""The scales of an 8-bit KV cache that a checkpoint brings."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from .config import ModelConfig
from .errors import ModelLoadError
from .weights import WeightSource

__all__ = ["read_kv_scales"]

_NAMES = {
    "key": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "value": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}
"""Under `model.layers.N.self_attn`, as the usual tools for quantising call them."""


def read_kv_scales(config: ModelConfig, source: WeightSource) -> list[tuple[float, float]] | None:
    """Each layer's scales of keys and of values: a cached 1 stands for so much.

    None if the checkpoint has none; what a layer lacks is 1. Raises `ModelLoadError` for a scale
    that is not one positive number.
    """
    names = source.names()
    layers = []
    is_there = False
    for layer in range(config.num_layers):
        pair = []
        for kind in ("key", "value"):
            name = _find(names, layer, kind)
            is_there |= name is not None
            pair.append(1.0 if name is None else _read(source, name))
        layers.append((pair[0], pair[1]))
    return layers if is_there else None


def _find(names: Collection[str], layer: int, kind: str) -> str | None:
    paths = (f"model.layers.{layer}.self_attn.{name}" for name in _NAMES[kind])
    return next((path for path in paths if path in names), None)


def _read(source: WeightSource, name: str) -> float:
    shape = source.shape(name)
    if math.prod(shape) != 1:
        raise ModelLoadError(
            f"{source.path}: tensor {name!r} has the shape {list(shape)}; a scale of the KV cache "
            "is one number for each layer"
        )
    number = torch.empty(shape)
    source.read(name, number)
    scale = float(number.item())
    if not 0 < scale < math.inf:
        raise ModelLoadError(
            f"{source.path}: tensor {name!r} is {scale}; a scale must be above 0 and finite"
        )
    return scale
