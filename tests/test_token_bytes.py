from __future__ import annotations

import json
import random
import unicodedata

import pytest

from miniinfer.token_bytes import longest_token
from miniinfer.tokenizer import Tokenizer


def texts(vocabulary, seed):
    """Texts with few tokens for their bytes, and texts that normalizers shorten."""
    source = random.Random(seed)
    longest = sorted(vocabulary, key=len)[-40:]
    yield from (text * 5 for text in longest)
    yield "".join(longest)
    yield " " * 1000
    yield "\n" * 1000
    yield unicodedata.normalize("NFD", "각하ᾂǖ" * 50)
    for _ in range(100):
        yield "".join(chr(source.choice((32, 0x61, 0xE9, 0x4E00, 0x1F600))) for _ in range(200))


def test_no_text_has_fewer_tokens_than_its_bytes_allow(real_tokenizers):
    assert len(real_tokenizers) > 3
    for name, path in real_tokenizers.items():
        tokenizer = Tokenizer.from_directory(path)
        bound = longest_token(tokenizer.json())
        assert bound is not None, name
        assert bound == tokenizer.longest_token
        vocabulary = [
            tokenizer.decode([token], False) for token in range(0, tokenizer.vocab_size, 7)
        ]
        for text in texts(vocabulary, name):
            ids = tokenizer.encode(text, False)
            assert len(text.encode()) <= bound * len(ids), (name, text[:40])


@pytest.fixture
def byte_level(tiny_model):
    return json.loads(Tokenizer.from_directory(tiny_model).json())


def bound_of(document):
    return longest_token(json.dumps(document).encode())


def test_bytes_alone(byte_level):
    texts = [*byte_level["model"]["vocab"], *(t["content"] for t in byte_level["added_tokens"])]
    assert bound_of(byte_level) == max(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "},
        {"type": "Replace", "pattern": {"String": " "}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    ],
)
def test_normalizers_that_may_drop_text(byte_level, normalizer):
    byte_level["normalizer"] = normalizer
    assert bound_of(byte_level) is None


def test_composition_shrinks(byte_level):
    plain = bound_of(byte_level)
    byte_level["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    assert bound_of(byte_level) == 4 * plain


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_added_tokens_that_swallow_space(byte_level, side):
    byte_level["added_tokens"][0][side] = True
    assert bound_of(byte_level) is None


@pytest.mark.parametrize("step", [{"type": "Whitespace"}, {"type": "Split", "behavior": "Removed"}])
def test_splits_that_remove(byte_level, step):
    steps = [step, byte_level["pre_tokenizer"]]
    byte_level["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    assert bound_of(byte_level) is None


def test_characters_that_are_unknown(byte_level):
    del byte_level["model"]["vocab"]["Ā"]
    assert bound_of(byte_level) is None


def test_models_of_other_kinds(byte_level):
    byte_level["model"] = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}
    assert bound_of(byte_level) is None
