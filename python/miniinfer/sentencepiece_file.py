"""Read a SentencePiece model file, without the SentencePiece library.

The file is one protocol buffer message, `ModelProto` of `sentencepiece_model.proto` in the
SentencePiece repository: the pieces with their scores and types, what the trainer was told, and how
text is normalised. GGUF stores the same vocabulary under other names, so the answer is given in
those, for `gguf_tokenizer.build_tokenizer`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tokenizer_parts import TokenizerError

__all__ = ["read_sentencepiece"]

# Field numbers.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNKNOWN_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 40, 41, 42, 43
_CHARACTER_MAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4

_BPE = 2
_NORMAL = 1

Value = int | bytes


def read_sentencepiece(path: Path) -> dict[str, Any] | None:
    """Return the vocabulary in `path` as GGUF metadata, or `None` if it is not of Llama's kind.

    Of Llama's kind means BPE over text that is not normalised.

    Raises:
        TokenizerError: the file cannot be read or is not a SentencePiece model.
    """
    try:
        return _convert(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error}") from None
    except (ValueError, struct.error) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None


def _convert(data: bytes) -> dict[str, Any] | None:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            piece = dict(_fields(_bytes(value)))
            tokens.append(_bytes(piece.get(_PIECE_TEXT, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(_PIECE_SCORE, bytes(4))))[0])
            types.append(_int(piece.get(_PIECE_TYPE, _NORMAL)))
        elif number == _TRAINER:
            trainer = dict(_fields(_bytes(value)))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_bytes(value)))
    if not tokens:
        raise ValueError("it has no pieces")
    if (
        trainer.get(_MODEL_TYPE) != _BPE
        or normalizer.get(_CHARACTER_MAP)
        or normalizer.get(_REMOVE_EXTRA_SPACES, 1)
    ):
        return None
    ids = {
        "unknown": _int(trainer.get(_UNKNOWN_ID, 0)),
        "bos": _int(trainer.get(_BOS_ID, 1)),
        "eos": _int(trainer.get(_EOS_ID, 2)),
        "padding": _int(trainer.get(_PAD_ID, -1)),
    }
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_ADD_DUMMY_PREFIX, 1)),
        **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items() if id_ >= 0},
    }


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the fields of one message: numbers as signed integers, all else as bytes.

    Source: "Encoding" in the documentation of Protocol Buffers.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire_type == 2:
            length, at = _varint(data, at)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type} before byte {at}")
        if length > len(data) - at:
            raise ValueError(f"a field of {length} bytes at byte {at} runs past the end")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError(f"a number before byte {at} is too long")


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number is where a text should be")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("a text is where a number should be")
    return value
