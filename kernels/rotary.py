"""Rotary position embedding (Su and others, 2021), in both layouts of a head."""

from __future__ import annotations

from torch import Tensor

from ._dispatch import check_dense, check_shape, use_triton


def apply_rotary(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate `query`, [T, Hq, D], and `key`, [T, Hkv, D], in place.

    Where both lie side by side they may come as one, in `query` alone. `positions` is integer [T];
    `cos` and `sin` are float32 [P, R / 2] with dense rows, one for each position, R <= D the
    rotated part of a head; whatever scaling there is, of angles or of the numbers themselves, is in
    them. Elements i and i + R / 2 turn together (GPT-NeoX, Llama), or if `interleaved` 2 i and
    2 i + 1 (GPT-J); those from R on stay as they are. Computed in float32. In `query` and `key`
    only the first dimension may be strided. A position of P or more is undefined.
    Raises ValueError where shapes or strides do not fit.
    """
    half = cos.shape[1]
    check_shape("sin", sin, tuple(cos.shape))
    check_dense("cos", cos, 1)
    check_dense("sin", sin, 1)
    for name, heads in (("query", query), ("key", key)):
        if heads is None:
            continue
        check_shape(name, heads, (positions.shape[0], heads.shape[1], query.shape[2]))
        check_dense(name, heads, 2)
        if 2 * half > heads.shape[2]:
            raise ValueError(f"{name} has a head size of {heads.shape[2]}; cos turns {2 * half}")
    if not use_triton(query):
        apply_rotary_reference(query, key, positions, cos, sin, interleaved=interleaved)
        return
    from ._rotary import launch

    launch(query, positions, cos, sin, interleaved)
    if key is not None:
        launch(key, positions, cos, sin, interleaved)


def apply_rotary_reference(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """`apply_rotary` in plain torch."""
    half = cos.shape[1]
    cosines, sines = (table[positions.long()].unsqueeze(1) for table in (cos, sin))
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    for heads in (query, key):
        if heads is None:
            continue
        a, b = heads[..., first].float(), heads[..., second].float()
        # In float32 these are views of what is written: both results come before either is stored.
        turned = a * cosines - b * sines, b * cosines + a * sines
        heads[..., first], heads[..., second] = (part.to(heads.dtype) for part in turned)
