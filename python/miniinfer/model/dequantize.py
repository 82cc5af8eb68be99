"""Dequantisation of ggml's block formats to float32, vectorised in numpy.

The formats are those of ggml (ggml-quants.h). Every result equals the reference in the `gguf`
package bit for bit: the same products and sums in float32, in the same order. Types that have no
function here are left to that package.

numpy releases the GIL in these loops, so that several tensors can be read by several threads;
torch's own threads are no help for rows of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..gguf_file import GGMLType, GGUFError

__all__ = ["dequantize"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Elements converted at a time: 1 MiB of float32, which with its temporaries stays in the L2 cache.
_CHUNK_ELEMENTS = 1 << 18

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_NIBBLE = np.uint64(4)
_FOUR = np.uint8(4)


def dequantize(data: Bytes, kind: GGMLType, out: Floats) -> None:
    """Write the elements of `data` into `out`.

    `data`: flat uint8, whole blocks of `kind`. `out`: flat contiguous float32 with one place for
    each element. Raises `GGUFError` for a type that neither this module nor the gguf package can
    read.
    """
    convert = _CONVERTERS.get(kind)
    if convert is None:
        out[:] = _by_gguf_package(data, kind)
        return
    elements, size = kind.block_elements, kind.block_bytes
    blocks, rows = data.reshape(-1, size), out.reshape(-1, elements)
    step = _CHUNK_ELEMENTS // elements
    for start in range(0, len(blocks), step):
        convert(blocks[start : start + step], rows[start : start + step])


def _by_gguf_package(data: Bytes, kind: GGMLType) -> Floats:
    import gguf  # 0.6 s to import, and needed for rare types alone

    try:
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError) as error:
        raise GGUFError(f"the type {kind.name} cannot be dequantised") from error
    return np.asarray(values, np.float32).reshape(-1)


def _half(blocks: Bytes, offset: int, count: int = 1) -> Floats:
    """`count` float16 numbers at a byte offset of each block: [blocks, count] float32."""
    return blocks[:, offset : offset + 2 * count].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """The 4-bit numbers of [n, bytes], in runs of `width` bytes: low halves, then high halves.

    Works on 8 bytes at a time; the result is [n, 2 * bytes].
    """
    count, size = packed.shape
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(-1, width // 8)
    halves = np.empty((len(words), 2, width // 8), np.uint64)
    np.bitwise_and(words, _LOW_NIBBLES, out=halves[:, 0])
    np.bitwise_and(words >> _NIBBLE, _LOW_NIBBLES, out=halves[:, 1])
    return halves.view(np.uint8).reshape(count, 2 * size)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32 bits of [n, 4] bytes, lowest first, as 16 or 0: [n, 32] uint8."""
    return np.unpackbits(packed, axis=1, bitorder="little") << _FOUR


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    out[:] = (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 2:], 16)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 4:], 16)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _sub_block_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 6-bit scales and minima of the 8 sub-blocks, from 12 bytes: two arrays [n, 8].

    Bytes 0-3 and 4-7 hold the first four scales and minima; their upper two bits complete the
    nibbles of bytes 8-11, the last four of both.
    """
    first_scales, first_minima, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first_scales & 63, (last & 15) | (first_scales >> 6 << 4)), axis=1)
    minima = np.concatenate((first_minima & 63, (last >> 4) | (first_minima >> 6 << 4)), axis=1)
    return scales, minima


def _scale_sub_blocks(blocks: Bytes, out: Floats) -> None:
    """out = (d * scale) * out - (dmin * minimum), for each sub-block of 32."""
    scales, minima = _sub_block_scales(blocks[:, 4:16])
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= (_half(blocks, 0) * scales)[:, :, None]
    sub_blocks -= (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 16:], 32)
    _scale_sub_blocks(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    # Bit j of byte l of the 32 high bytes belongs to element l of sub-block j.
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2) << 4
    out[:] = _nibbles(blocks[:, 48:], 32) | bits.reshape(-1, 256)
    _scale_sub_blocks(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = _nibbles(blocks[:, :128], 64)
    # In each half of the block, bits 2j and 2j + 1 of byte l belong to element 32 j + l.
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    out[:] = low | (high << 4).reshape(-1, 256)
    out -= 32
    runs = out.reshape(-1, 16, 16)
    runs *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


_CONVERTERS: dict[GGMLType, Callable[[Bytes, Floats], None]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
