"""Rotary position embedding in GPT-NeoX's layout: a head's halves are the two coordinates."""

from __future__ import annotations

from torch import Tensor

from ._dispatch import check_dense, check_shape, use_triton


def apply_rotary(query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `query`, [T, Hq, D], and `key`, [T, Hkv, D], in place.

    `positions` is integer [T]; `cos` and `sin` are float32 [P, R / 2], rows for positions, R <= D
    the rotated part of a head. Elements i and i + R / 2 turn together; those from R on stay as they
    are. Computed in float32 (Su and others, 2021). In `query` and `key` only the first dimension
    may be strided. A position of P or more is undefined.
    """
    half = cos.shape[1]
    check_shape("sin", sin, tuple(cos.shape))
    check_dense("cos", cos, 2)
    check_dense("sin", sin, 2)
    for name, heads in (("query", query), ("key", key)):
        check_shape(name, heads, (positions.shape[0], heads.shape[1], query.shape[2]))
        check_dense(name, heads, 2)
        if 2 * half > heads.shape[2]:
            raise ValueError(f"{name} has a head size of {heads.shape[2]}; cos turns {2 * half}")
    if not use_triton(query):
        apply_rotary_reference(query, key, positions, cos, sin)
        return
    from ._rotary import launch

    launch(query, positions, cos, sin)
    launch(key, positions, cos, sin)


def apply_rotary_reference(
    query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """`apply_rotary` in plain torch."""
    half = cos.shape[1]
    cosines, sines = (table[positions.long()].unsqueeze(1) for table in (cos, sin))
    for heads in (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., :half] = (first * cosines - second * sines).to(heads.dtype)
        heads[..., half : 2 * half] = (second * cosines + first * sines).to(heads.dtype)
