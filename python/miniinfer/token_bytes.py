"""How much text one token can stand for, so that hopeless texts need not be tokenised."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["longest_token"]

_NFC_SHRINKS_BY = 4
"""Canonical composition makes no text shorter than a quarter of its UTF-8 bytes.

The worst are Hangul syllables, which compose from 9 bytes to 3; see the Unicode Standard Annex 15.
"""

_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")
"""Steps that lose no text, unless they are told to remove what they split at."""


def longest_token(tokenizer_json: bytes) -> int | None:
    """Return the most bytes of UTF-8 that one token of a `tokenizer.json` can stand for.

    A text of more than n times that many bytes has more than n tokens. None: there is no such
    number, or none is known, as the tokenizer can drop text, or fold any length of it into one
    token.
    """
    document = json.loads(tokenizer_json)
    shrinks_by = _shrinking(document["normalizer"])
    added = document["added_tokens"]
    if shrinks_by is None or not _keeps_all(document["pre_tokenizer"]):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocabulary = document["model"].get("vocab")
    if document["model"].get("type") != "BPE" or not _knows_every_byte(document, vocabulary):
        return None
    # A token's spelling is never shorter than its text: ▁ is a space, `<0x0A>` and Ċ are a byte.
    texts = [*vocabulary, *(token["content"] for token in added)]
    return shrinks_by * max(len(text.encode()) for text in texts)


def _shrinking(normalizer: Any) -> int | None:
    """Return by how much a normalizer can shorten a text; None if by any factor."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "NFC":
        return _NFC_SHRINKS_BY
    if kind == "Prepend":
        return 1
    if kind == "Replace" and normalizer["pattern"] == {"String": " "}:
        return 1 if normalizer["content"] else None
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrinking(step)
            if factor is None:
                return None
            product *= factor
        return product
    return None


def _keeps_all(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_all(step) for step in pre_tokenizer["pretokenizers"])
    known = pre_tokenizer["type"] in _PRE_TOKENIZERS
    return known and pre_tokenizer.get("behavior") != "Removed"


def _knows_every_byte(document: Any, vocabulary: Any) -> bool:
    """Return whether no character is unknown: unknown ones can vanish, or be fused into one."""
    if document["model"].get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return _is_byte_level(document["pre_tokenizer"]) and all(
        character in vocabulary for character in _byte_characters()
    )


def _is_byte_level(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_is_byte_level(step) for step in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] == "ByteLevel")


def _byte_characters() -> list[str]:
    """Return the characters that byte-level vocabularies spell bytes with, as GPT-2's does.

    Bytes that print stand for themselves, the others for the code points from 256 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in (*printing, *range(256, 512 - len(printing)))]
