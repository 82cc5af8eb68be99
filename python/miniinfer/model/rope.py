"""Rotary position embedding (Su et al., RoFormer, 2021) and its scalings to longer contexts.

The frequencies agree with transformers' for every kind, so that a model gives the same logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import RopeConfig

__all__ = ["inverse_frequencies", "rotary_table"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """The angle per position of each pair of dimensions, and the factor on cosine and sine.

    Returns float32 [head_dim / 2] and a number. For the dynamic kind these are the frequencies
    within the original length; `rotary_table` has the rest.
    """
    if rope.kind == "llama3":
        return _llama3(rope, _plain(rope.theta, head_dim)), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    if rope.kind == "linear":
        return _plain(rope.theta, head_dim) / rope.factor, 1.0
    return _plain(rope.theta, head_dim), 1.0


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, factors: Tensor | None = None
) -> Tensor:
    """Cosines and sines for positions 0 to `num_positions` - 1: float32 [num_positions, head_dim].

    The first half of a row holds the cosines, the second the sines. `factors`: float32
    [head_dim / 2], divisors of the frequencies that a GGUF file may bring.

    Dynamic NTK scaling makes the base a function of the sequence's length. A cached key keeps the
    rotation it was given, so the length here is the token's own position + 1: the row depends on
    the position alone, whatever the chunking, the batch or the prefix cache. This is transformers'
    result within the original length, and beyond it when tokens are decoded one by one; a prompt
    longer than the original length differs from transformers, which rotates all of it by its full
    length.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim)
    if factors is not None:
        frequencies = frequencies / factors.to("cpu", torch.float32)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    original = rope.original_max_position_embeddings
    if rope.kind == "dynamic" and num_positions > original:
        late = positions[original:]
        angles[original:] = late[:, None] * _dynamic(rope, head_dim, late + 1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, lengths: Tensor) -> Tensor:
    """Frequencies for each length beyond the original one: [lengths, head_dim / 2]."""
    stretch = rope.factor * lengths.double() / rope.original_max_position_embeddings
    bases = rope.theta * (stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return (1.0 / bases[:, None] ** _exponents(head_dim).double()).float()


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023), "NTK-by-parts": like llama3, but blended along the dimensions."""

    def dimension(rotations: float) -> float:
        """The pair, as a fraction, that turns `rotations` times in the original length."""
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0, 1)
    frequencies = _plain(rope.theta, head_dim)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
