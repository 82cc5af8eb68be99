"""SentencePiece models read directly, against the SentencePiece library."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from miniinfer.sentencepiece_file import read_sentencepiece
from miniinfer.tokenizer import Tokenizer, TokenizerError

TEXTS = json.loads((Path(__file__).parent / "data" / "tokenizer_texts.json").read_text("utf-8"))


def train_sentencepiece(directory: Path, **options: Any) -> Any:
    import sentencepiece

    corpus = directory / "corpus.txt"
    lines = [f"the  cat sat on mat {i} hello world, é日" for i in range(400)]
    corpus.write_text("\n".join(lines), "utf-8")
    settings = {
        "vocab_size": 360,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>"],
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), **settings | options
    )
    return sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_file(tmp_path: Path, prefix: bool) -> None:
    reference = train_sentencepiece(tmp_path, add_dummy_prefix=prefix)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.vocab_size == 360
    # SentencePiece takes no control token from text.
    texts = [text for text in TEXTS if not text.startswith("<s>")]
    if not prefix:
        # With a prefix it puts one before the piece; tokenizers' added tokens get none.
        texts.append("a<tool> b")
    for text in ["hello world", "the  cat é 日本 😀", "  two  spaces ", *texts]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ([1, *ids] if text else [1]), text
        assert tokenizer.decode(ids) == reference.decode(ids), text


def test_sentencepiece_with_config(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "<eot>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    # <eot> is new: it comes after the 360 pieces.
    assert tokenizer.encode("hello")[-1] == 360
    assert tokenizer.encode("hello")[0] != 1
    assert tokenizer.eos_token_ids == (360,)


def test_sentencepiece_unigram_needs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_sentencepiece(tmp_path, model_type="unigram", vocab_size=300)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'miniinfer\[transformers\]'"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it has no pieces"),
        (b"not a model", "is not a SentencePiece model"),
        (b"\x0a\x7f\x0a", "a field of 127 bytes at byte 2 runs past the end"),
        (b"\x0a", "it is cut off"),
        (b"\xff" * 12, "is too long"),
        (b"\x08\x01", "a number is where a text should be"),
        (b"\x0a\x03\x0a\x01\xff", "can't decode"),
        (b"\x0a\x04\x15\x00\x00\x00", "runs past the end"),
        (b"\x0a\x03\x12\x01\x00", "requires a buffer of 4 bytes"),
    ],
)
def test_damaged_sentencepiece_file(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=problem) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "tokenizer.model" in str(caught.value)


def test_random_damage_is_an_error_or_a_tokenizer(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, vocab_size=300)
    path = tmp_path / "tokenizer.model"
    whole = path.read_bytes()
    source = random.Random(4)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        vocabulary = None
        path.write_bytes(damaged[: source.randint(1, len(damaged))])
        with contextlib.suppress(TokenizerError):
            vocabulary = read_sentencepiece(path)
            if vocabulary:
                Tokenizer.from_gguf_metadata(vocabulary, name="damaged").encode("hello")
