"""Tokenizers from GGUF metadata, against those converted from and a naive implementation."""

from __future__ import annotations

import itertools
import json
import random
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Backend

from miniinfer.gguf_file import GGUFFile
from miniinfer.gguf_tokenizer import PRE_TOKENIZERS, TokenType
from miniinfer.tokenizer import Tokenizer, TokenizerError

TEXTS = json.loads((Path(__file__).parent / "data" / "tokenizer_texts.json").read_text("utf-8"))


def random_texts(count: int) -> Iterator[str]:
    source = random.Random(20)
    alphabet = "abcXYZ 0123456789\n\r\t  .,!?'\"-_/\\éßñ日本語한국🎉😀あアضم\u0301"
    for _ in range(count):
        yield "".join(source.choices(alphabet, k=source.randint(1, 60)))


ALL_TEXTS = [*TEXTS, *random_texts(400)]


def as_gguf(directory: Path, model: str, **extra: Any) -> dict[str, Any]:
    """The metadata a converter would write for the tokenizer in `directory`."""
    document = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    merges = document["model"]["merges"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    ids = dict(document["model"]["vocab"])
    ids.update((token["content"], token["id"]) for token in document["added_tokens"])
    size = max(ids.values()) + 1
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [TokenType.UNUSED] * size
    for token, index in ids.items():
        tokens[index] = token
        is_byte = regex.fullmatch("<0x[0-9A-F]{2}>", token) is not None
        types[index] = TokenType.BYTE if is_byte and model == "llama" else TokenType.NORMAL
    for token in document["added_tokens"]:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        types[token["id"]] = kind
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
    }
    if model == "gpt2":
        metadata["tokenizer.ggml.merges"] = merges
    else:
        ranks: dict[str, int] = {}
        for merge in merges:
            ranks.setdefault(merge.replace(" ", ""), len(ranks))
        metadata["tokenizer.ggml.scores"] = [-float(ranks.get(token, 1e9)) for token in tokens]
        metadata["tokenizer.ggml.unknown_token_id"] = ids["<unk>"]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


@pytest.mark.parametrize(
    ("name", "model", "extra"),
    [
        ("llama2", "llama", {"bos_token_id": 1, "eos_token_id": 2}),
        ("gemma3", "llama", {"bos_token_id": 2, "add_space_prefix": False}),
        ("llama3_1", "gpt2", {"pre": "llama-bpe", "bos_token_id": 128000}),
        ("qwen3", "gpt2", {"pre": "qwen2"}),
        ("deepseek_v3", "gpt2", {"pre": "deepseek-v3"}),
        ("gptoss", "gpt2", {"pre": "gpt-4o"}),
        ("mistral_nemo", "gpt2", {"pre": "tekken", "bos_token_id": 1}),
    ],
)
def test_gguf_gives_the_ids_of_the_tokenizer_it_was_converted_from(
    real_tokenizers: dict[str, Path], name: str, model: str, extra: dict[str, Any]
) -> None:
    reference = Backend.from_file(str(real_tokenizers[name] / "tokenizer.json"))
    metadata = as_gguf(real_tokenizers[name], model, **extra)
    tokenizer = Tokenizer.from_gguf_metadata(metadata, name=name)
    for text in ALL_TEXTS:
        ids = reference.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == reference.decode(ids), text
        whole = reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole, text


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + index) for index, byte in enumerate(moved)
    }


class NaiveTokenizer:
    """Byte-level BPE as its paper has it: join the best-ranked pair until none is left."""

    WORDS = regex.compile(
        r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: Any) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        types = metadata["tokenizer.ggml.token_type"]
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.control = regex.compile("(" + "|".join(map(regex.escape, control)) + ")")
        self.characters = bytes_to_characters()

    def encode(self, text: str) -> list[int]:
        ids = []
        for index, section in enumerate(self.control.split(text)):
            if index % 2:
                ids.append(self.ids[section])
                continue
            # A digit is cut off first, so it is the end of the text for the space before it.
            for part in regex.split(r"(\p{N})", section):
                for word in self.WORDS.findall(part):
                    ids += [self.ids[piece] for piece in self.pieces(word)]
        return ids

    def pieces(self, word: str) -> list[str]:
        parts = [self.characters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            rank, at = min((self.ranks.get(pair, sys.maxsize), i) for i, pair in enumerate(pairs))
            if rank == sys.maxsize:
                break
            parts[at : at + 2] = ["".join(pairs[at])]
        return parts


def test_builtin_equals_a_naive_implementation(builtin_gguf: Path) -> None:
    builtin = Tokenizer.from_gguf(builtin_gguf)
    naive = NaiveTokenizer(GGUFFile(builtin_gguf).metadata)
    for text in ALL_TEXTS:
        assert builtin.encode(text) == naive.encode(text), text
        assert builtin.decode(builtin.encode(text), skip_special_tokens=False) == text


def small_gguf(**changes: Any) -> dict[str, Any]:
    """Byte-level BPE over 256 bytes, one merge and two control tokens."""
    tokens = [*bytes_to_characters().values(), "ab", "<|bos|>", "<|im_end|>", "<tool>"]
    types = [1] * 257 + [3, 3, 4]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 257,
    } | changes
    return {
        f"tokenizer.{'' if key.startswith('chat_template') else 'ggml.'}{key}": value
        for key, value in metadata.items()
        if value is not None
    }


def small(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(small_gguf(**changes), name="small.gguf")


def test_gguf_token_types() -> None:
    tokenizer = small()
    assert tokenizer.encode("ab<tool><|bos|>") == [256, 259, 257]
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.decode([256, 259, 257]) == "ab<tool>"
    assert tokenizer.vocab_size == 260


def test_gguf_end_of_turn_tokens() -> None:
    # <|im_end|> ends a turn although the file names only another token.
    assert small().eos_token_ids == (257, 258)
    assert small(eot_token_id=259).eos_token_ids == (257, 259)
    assert small(eos_token_id=None, token_type=[1] * 260).eos_token_ids == ()


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"),
    [
        (True, True, [257, 256, 257]),
        (True, False, [257, 256]),
        (False, True, [256, 257]),
        (None, None, [256]),
    ],
)
def test_gguf_bos_and_eos(add_bos: Any, add_eos: Any, expected: list[int]) -> None:
    tokenizer = small(add_bos_token=add_bos, add_eos_token=add_eos)
    assert tokenizer.encode("ab") == expected
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]


def test_gguf_chat_templates() -> None:
    assert small().chat_template is None
    assert small(chat_template="x").chat_template == "x"
    named = small(**{"chat_template": "x", "chat_template.tool_use": "y"})
    assert named.chat_template == {"default": "x", "tool_use": "y"}
    message = [{"role": "user", "content": "a"}]
    assert named.apply_chat_template(message) == "x"
    assert named.apply_chat_template(message, tools=[{}]) == "y"


def test_gguf_without_pre_tokenizer_warns() -> None:
    with pytest.warns(UserWarning, match="names no pre-tokenizer"):
        tokenizer = small(pre=None)
    assert tokenizer.encode("ab") == [256]


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS])
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    assert len(PRE_TOKENIZERS) > 30
    tokenizer = small(pre=name, add_bos_token=False)
    for text in ALL_TEXTS[:120]:
        if PRE_TOKENIZERS[name].nfc:
            text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


SCORES = {"model": "llama", "scores": [0.0] * 260}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "tokenizer.ggml.model is int, not a string"),
        ({"model": "bert"}, "'bert': supported are 'gpt2'"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": [1, 2]}, "not an array of strings"),
        ({"tokens": "abc"}, "not an array of strings"),
        ({"tokens": ["a", "a"], "token_type": None}, r"tokens\[0\] is 'a', which is also token 1"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 260 tokens"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', not two tokens"),
        ({"merges": ["a nothing"]}, "merges do not fit the tokens"),
        ({"pre": "unheard-of"}, "'unheard-of': supported are default, gpt-2"),
        ({"pre": 7}, "tokenizer.ggml.pre is 7"),
        ({"bos_token_id": 260}, "bos_token_id is 260, outside the vocabulary of 260 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "2"}, "eot_token_id is '2'"),
        ({"chat_template": 5}, "tokenizer.chat_template is int"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({**SCORES, "scores": [0.0]}, "scores has 1 entries for 260 tokens"),
    ],
)
def test_gguf_errors_name_the_key(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem) as caught:
        small(**changes)
    assert str(caught.value).startswith("small.gguf: ")
