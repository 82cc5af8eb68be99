"""A memory-mapped reader of GGUF model files, versions 2 and 3.

Follows the GGUF specification (docs/gguf.md of ggml). Opening a file walks its header once and
keeps offsets; a metadata value is decoded when it is asked for, and tensor data stays in the file
until it is read. So a file with a vocabulary of a hundred thousand strings opens in milliseconds.

The file is untrusted: every count, length, offset and depth is checked against the size of the file
before it is used, and what is wrong is a `GGUFError` that names the file, the offset and the value.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

__all__ = ["GGMLType", "GGUFError", "GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 65535  # the specification's limit for keys
MAX_ARRAY_DEPTH = 4

# Metadata value types, by the specification's numbers: (struct format, numpy type).
_SCALARS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING = 8
_ARRAY = 9
# The least room that one value takes: a string's length field, an array's type and count.
_MIN_VALUE_BYTES = {_STRING: 8, _ARRAY: 12} | {
    code: struct.calcsize(layout) for code, (layout, _) in _SCALARS.items()
}
_READ_U32 = struct.Struct("<I").unpack_from
_READ_U64 = struct.Struct("<Q").unpack_from


class GGUFError(ValueError):
    """A GGUF file that is damaged, truncated or of a kind that cannot be read."""


class GGMLType(IntEnum):
    """Element types of tensors, by ggml's numbers."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40

    @property
    def block_elements(self) -> int:
        """Elements in one block; the unit a tensor's rows are made of."""
        return _BLOCK_LAYOUT[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCK_LAYOUT[self][1]


_BLOCK_LAYOUT: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.F64: (1, 8),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file.

    `shape` is in numpy's order (the contiguous dimension last; the file stores the reverse). `data`
    is a read-only flat uint8 view of the mapped file: the blocks of `type`, row after row.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: npt.NDArray[np.uint8]


class _Value(NamedTuple):
    """Where a metadata value lies: its type code and the offset of its first byte."""

    type_code: int
    offset: int


class GGUFFile:
    """A GGUF file, open for reading.

    `path`: the file. Raises `GGUFError` for a file that is not GGUF, is damaged or truncated, or
    has an unsupported version; `OSError` when it cannot be opened. The mapping lives as long as
    this object or any tensor's data does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buffer = self._map()
        self._size = len(self._buffer)
        self.version, tensor_count, value_count = self._read_preamble()
        offset = 24
        values, offset = self._index_metadata(value_count, offset)
        self.metadata: Mapping[str, Any] = _Metadata(self, values)
        self._tensor_count = tensor_count
        self._tensor_table = offset

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The tensors by name, in the order of the file; read when first asked for."""
        alignment = self._alignment()
        entries, table_end = self._index_tensors(self._tensor_count, self._tensor_table)
        data_start = -(-table_end // alignment) * alignment
        return {
            name: self._locate(name, shape, kind, data_start, relative, alignment)
            for name, (shape, kind, relative) in entries.items()
        }

    def _fail(self, problem: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {problem}")

    def _map(self) -> memoryview:
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                self._fail(f"not a GGUF file: {size} bytes, the header alone has 24")
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))

    def _read_preamble(self) -> tuple[int, int, int]:
        magic = bytes(self._buffer[:4])
        if magic != MAGIC:
            self._fail(f"not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
        version, tensor_count, value_count = struct.unpack_from("<IQQ", self._buffer, 4)
        if version not in SUPPORTED_VERSIONS:
            if version & 0xFFFF == 0:
                self._fail("big-endian GGUF files are not supported")
            self._fail(f"GGUF version {version} is not supported (supported: 2, 3)")
        # A value takes at least a key length, a type and one byte; a tensor 32 bytes and its name.
        self._check_count("metadata values", value_count, 13, 24)
        self._check_count("tensors", tensor_count, 32, 24)
        return version, tensor_count, value_count

    def _check_count(self, what: str, count: int, least_bytes: int, offset: int) -> None:
        room = self._size - offset
        if count * least_bytes > room:
            self._fail(
                f"{count} {what} at offset {offset} need at least {count * least_bytes} bytes, "
                f"but {room} are left: the file is truncated or corrupt"
            )

    def _check_room(self, what: str, length: int, offset: int) -> None:
        if length > self._size - offset:
            self._fail(
                f"{what} at offset {offset} needs {length} bytes, but "
                f"{max(self._size - offset, 0)} are left: the file is truncated or corrupt"
            )

    def _u32(self, what: str, offset: int) -> tuple[int, int]:
        self._check_room(what, 4, offset)
        return _READ_U32(self._buffer, offset)[0], offset + 4

    def _u64(self, what: str, offset: int) -> tuple[int, int]:
        self._check_room(what, 8, offset)
        return _READ_U64(self._buffer, offset)[0], offset + 8

    def _name(self, what: str, offset: int) -> tuple[str, int]:
        length, start = self._u64(what, offset)
        if length > MAX_NAME_BYTES:
            self._fail(
                f"{what} at offset {offset} has {length} bytes, the limit is {MAX_NAME_BYTES}"
            )
        self._check_room(what, length, start)
        try:
            return str(self._buffer[start : start + length], "utf-8"), start + length
        except UnicodeDecodeError as error:
            self._fail(f"{what} at offset {offset} is not UTF-8: {error.reason}")

    def _index_metadata(self, count: int, offset: int) -> tuple[dict[str, _Value], int]:
        values: dict[str, _Value] = {}
        for _ in range(count):
            start = offset
            key, offset = self._name("a metadata key", offset)
            if key in values:
                self._fail(f"metadata key {key!r} appears twice, again at offset {start}")
            type_code, offset = self._u32(f"the type of {key!r}", offset)
            values[key] = _Value(type_code, offset)
            offset = self._skip(key, type_code, offset, 0)
        return values, offset

    def _skip(self, key: str, type_code: int, offset: int, depth: int) -> int:
        """The offset behind the value at `offset`, every part of it checked to lie in the file."""
        if type_code == _STRING:
            length, offset = self._u64(key, offset)
            self._check_room(repr(key), length, offset)
            return offset + length
        if type_code != _ARRAY:
            least = self._least_bytes(key, type_code, offset)
            self._check_room(repr(key), least, offset)
            return offset + least
        if depth == MAX_ARRAY_DEPTH:
            self._fail(f"{key!r} at offset {offset} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        item_type, count, offset = self._array_head(key, offset)
        if item_type in _SCALARS:
            return offset + count * _MIN_VALUE_BYTES[item_type]
        if item_type == _STRING:
            return self._skip_strings(key, count, offset)
        for _ in range(count):
            offset = self._skip(key, item_type, offset, depth + 1)
        return offset

    def _least_bytes(self, key: str, type_code: int, offset: int) -> int:
        least = _MIN_VALUE_BYTES.get(type_code)
        if least is None:
            self._fail(f"{key!r} at offset {offset} has the unknown value type {type_code}")
        return least

    def _array_head(self, key: str, offset: int) -> tuple[int, int, int]:
        """(type of the items, number of items, offset of the first item)."""
        item_type, start = self._u32(repr(key), offset)
        count, start = self._u64(repr(key), start)
        self._check_count(
            f"items of {key!r}", count, self._least_bytes(key, item_type, offset), start
        )
        return item_type, count, start

    def _skip_strings(self, key: str, count: int, offset: int) -> int:
        # A vocabulary and its merges are some hundred thousand strings: hence a loop without calls.
        buffer, last_length = self._buffer, self._size - 8
        for _ in range(count):
            if offset > last_length:
                self._check_room(f"a string of {key!r}", 8, offset)
            offset += 8 + _READ_U64(buffer, offset)[0]
        self._check_room(f"the end of {key!r}", 0, offset)
        return offset

    def _decode_strings(self, count: int, offset: int) -> tuple[list[str], int]:
        buffer, values = self._buffer, []
        for _ in range(count):
            start = offset + 8
            offset = start + _READ_U64(buffer, offset)[0]
            values.append(str(buffer[start:offset], "utf-8", "replace"))
        return values, offset

    def _decode(self, key: str, type_code: int, offset: int) -> tuple[Any, int]:
        """The value at `offset`, which `_skip` has checked, and the offset behind it."""
        if type_code == _STRING:
            (length,) = _READ_U64(self._buffer, offset)
            end = offset + 8 + length
            return str(self._buffer[offset + 8 : end], "utf-8", "replace"), end
        if type_code != _ARRAY:
            layout = _SCALARS[type_code][0]
            return struct.unpack_from(layout, self._buffer, offset)[0], offset + struct.calcsize(
                layout
            )
        item_type, count, offset = self._array_head(key, offset)
        if item_type in _SCALARS:
            items = np.frombuffer(self._buffer, _SCALARS[item_type][1], count, offset)
            return items.tolist(), offset + items.nbytes
        if item_type == _STRING:
            return self._decode_strings(count, offset)
        values: list[Any] = []
        for _ in range(count):
            value, offset = self._decode(key, item_type, offset)
            values.append(value)
        return values, offset

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two, not {alignment!r}")
        return alignment

    def _index_tensors(
        self, count: int, offset: int
    ) -> tuple[dict[str, tuple[tuple[int, ...], GGMLType, int]], int]:
        entries: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
        for _ in range(count):
            start = offset
            name, offset = self._name("a tensor name", offset)
            if name in entries:
                self._fail(f"tensor {name!r} appears twice, again at offset {start}")
            dimension_count, offset = self._u32(f"tensor {name!r}", offset)
            if not 1 <= dimension_count <= MAX_DIMENSIONS:
                self._fail(
                    f"tensor {name!r} at offset {start} has {dimension_count} dimensions, "
                    f"allowed are 1 to {MAX_DIMENSIONS}"
                )
            self._check_room(f"tensor {name!r}", 8 * dimension_count + 12, offset)
            *dimensions, type_code, relative = struct.unpack_from(
                f"<{dimension_count}QIQ", self._buffer, offset
            )
            offset += 8 * dimension_count + 12
            try:
                kind = GGMLType(type_code)
            except ValueError:
                self._fail(f"tensor {name!r} at offset {start} has the unknown type {type_code}")
            entries[name] = (tuple(reversed(dimensions)), kind, relative)
        return entries, offset

    def _locate(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLType,
        data_start: int,
        relative: int,
        alignment: int,
    ) -> GGUFTensor:
        if 0 in shape or shape[-1] % kind.block_elements:
            self._fail(
                f"tensor {name!r} has the shape {list(shape)}; {kind.name} needs rows of a "
                f"positive multiple of {kind.block_elements} elements"
            )
        if relative % alignment:
            self._fail(
                f"tensor {name!r} has the data offset {relative}, not a multiple of {alignment}"
            )
        length = prod(shape) // kind.block_elements * kind.block_bytes
        offset = data_start + relative
        self._check_room(f"the data of tensor {name!r}", length, offset)
        data = np.frombuffer(self._buffer, np.uint8, length, offset)
        return GGUFTensor(name, shape, kind, data)


class _Metadata(Mapping[str, Any]):
    """The metadata of a file; a value is decoded at its first use and then kept.

    Values are int, float, bool, str or (nested) lists of these. Text that is not UTF-8 is decoded
    with U+FFFD in place of the invalid bytes.
    """

    def __init__(self, file: GGUFFile, values: dict[str, _Value]) -> None:
        self._file = file
        self._values = values
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            value = self._values[key]
            self._decoded[key], _ = self._file._decode(key, value.type_code, value.offset)
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
