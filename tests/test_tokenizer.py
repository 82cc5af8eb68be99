"""Tokenizers from directories and GGUF metadata, against references and first principles."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from miniinfer.chat_template import ChatTemplateError
from miniinfer.gguf_file import GGUFFile
from miniinfer.gguf_tokenizer import TokenType
from miniinfer.sentencepiece_file import read_sentencepiece
from miniinfer.source import ModelSource
from miniinfer.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading",
    "trailing  ",
    "\n\n\n",
    "  a  b   c    d",
    "def f(x):\n\treturn x**2  # 12345678\n\n\n    pass",
    "日本語のテキスト、中文。",
    "Привет, мир! 123",
    "😀👩‍👧 emoji",
    "e\u0301 café",
    "I'LL you're we'Ve 'tis",
    "a\r\nb\r\n",
    "٣٤٥ ١٢ ½",
    "ünïcödé ŁÓDŹ",
    "\u00a0nbsp\u3000wide",
    "CamelCaseWordsHTTPServer",
    "x" * 300,
    "\t\t\ttabs",
    "!!!???...,,;;",
    "http://a.b/c?d=e&f=g",
    "𝒜𝓁𝓅𝒽𝒶",
    "\ufffd\x00\x01",
    "नमस्ते दुनिया",
    "▁under ▁▁ score",
    "한국어 텍스트입니다",
    "1234567890 3.14159 0x1F",
    "<s>hi</s> <unk> <0x41>",
    "<|im_start|>user<|im_end|><|endoftext|>",
]


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


@pytest.fixture(scope="module")
def builtin(builtin_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(builtin_gguf)


def test_builtin_equals_a_naive_implementation(builtin: Tokenizer, builtin_gguf: Path) -> None:
    naive = NaiveTokenizer(GGUFFile(builtin_gguf).metadata)
    for text in ALL_TEXTS:
        assert builtin.encode(text) == naive.encode(text), text
        assert builtin.decode(builtin.encode(text), skip_special_tokens=False) == text


def test_builtin_properties(builtin: Tokenizer) -> None:
    assert builtin.vocab_size == 49152
    assert builtin.bos_token_id == 1
    assert builtin.eos_token_ids == (2,)
    assert builtin.special_ids == frozenset(range(17))
    assert builtin.token_to_id("<|im_end|>") == 2
    assert builtin.id_to_token(2) == "<|im_end|>"
    assert builtin.id_to_token(49152) is None
    assert builtin.id_to_token(-1) is None
    assert builtin.token_to_id("no such token") is None
    assert builtin.encode("Hello world") == [19556, 905]
    prompt = builtin.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert builtin.encode_chat([{"role": "user", "content": "Hi"}]) == builtin.encode(prompt)


def test_json_is_the_same_tokenizer(builtin: Tokenizer) -> None:
    copy = Backend.from_str(builtin.json().decode())
    for text in ALL_TEXTS[:100]:
        assert copy.encode(text).ids == builtin.encode(text)


def test_batch_and_threads_agree_with_single(builtin: Tokenizer) -> None:
    expected = [builtin.encode(text) for text in ALL_TEXTS]
    assert builtin.encode_batch(ALL_TEXTS) == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(builtin.encode, ALL_TEXTS)) == expected


def test_ids_without_text_decode_to_nothing(builtin: Tokenizer) -> None:
    assert builtin.decode([]) == ""
    hello = builtin.encode("Hello")
    assert builtin.decode([*hello, 49152, 2**31]) == "Hello"
    assert builtin.decode([-1, *hello, 2**40]) == "Hello"


def test_lone_surrogates_become_replacement_characters(builtin: Tokenizer) -> None:
    assert builtin.decode(builtin.encode("a\ud83db")) == "a\ufffdb"
    assert builtin.decode(builtin.encode("\ud83d\ude00")) == "😀"


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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with the same small vocabulary and no chat template."""
    tokens = [*bytes_to_characters().values(), "ab"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, bos_token="<s>", eos_token="</s>")
    return tmp_path


def configure(directory: Path, **config: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_directory(directory: Path) -> None:
    tokenizer = Tokenizer.from_source(ModelSource("hf", directory, "small"))
    assert tokenizer.name == "small"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (257, (258,))
    assert tokenizer.encode("ab</s>") == [256, 258]
    assert tokenizer.decode([256, 258]) == "ab"


def test_directory_without_config(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.name == directory.name


def test_older_special_tokens_map_is_read(directory: Path) -> None:
    configure(directory, eos_token="</s>")
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<s>"})
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (257, (258,))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"add_bos_token": True}, [257, 256]),
        ({"add_eos_token": True}, [256, 258]),
        ({"add_bos_token": True, "add_eos_token": True}, [257, 256, 258]),
        ({"add_bos_token": False}, [256]),
        ({"add_bos_token": None}, [256]),
    ],
)
def test_bos_and_eos_that_the_config_asks_for(
    directory: Path, config: dict[str, Any], expected: list[int]
) -> None:
    configure(directory, bos_token="<s>", eos_token="</s>", **config)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("ab") == expected
    assert Backend.from_str(tokenizer.json().decode()).encode("ab").ids == expected


def test_post_processor_bos_is_not_doubled_nor_removed(directory: Path) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 257)]
    )
    backend.save(str(directory / "tokenizer.json"))
    for value in (True, False):
        configure(directory, bos_token="<s>", add_bos_token=value)
        assert Tokenizer.from_directory(directory).encode("ab") == [257, 256]


def test_tokens_of_the_config_are_added(directory: Path) -> None:
    declared = {
        "257": {"content": "<s>", "special": True},
        "259": {"content": "<call>", "special": False, "normalized": False},
        "260": {"content": "<eot>", "special": True},
    }
    configure(
        directory,
        eos_token={"__type": "AddedToken", "content": "<eot>"},
        added_tokens_decoder=declared,
        additional_special_tokens=["<x>"],
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer = Tokenizer.from_directory(directory)
    ids = [259, 260, 262, 261]
    assert tokenizer.encode("<call><eot><x><image>") == ids
    assert tokenizer.decode(ids) == "<call>"
    assert tokenizer.eos_token_ids == (260,)
    assert tokenizer.vocab_size == 263


def test_truncation_and_padding_in_the_file_are_off(directory: Path) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.from_directory(directory).encode("ababab") == [256] * 3


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a valid tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is not a valid tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not list"),
        ("tokenizer_config.json", "[" * 100_000, "is not valid JSON"),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token must be a string"),
        ("tokenizer_config.json", '{"eos_token": {"x": 1}}', "eos_token must be a string"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "must map ids to tokens"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 1}}', "must map ids to tokens"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"chat_template": []}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"chat_template": [{"name": 1}]}', "must be a string or a list"),
        ("special_tokens_map.json", "null", "must hold a JSON object, not NoneType"),
    ],
)
def test_directory_errors_name_the_file(
    directory: Path, file: str, text: str, problem: str
) -> None:
    (directory / file).write_text(text)
    with pytest.raises(TokenizerError, match=problem) as caught:
        Tokenizer.from_directory(directory)
    assert "\n" not in str(caught.value)
    assert file in str(caught.value)


def test_config_that_is_not_utf8(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(TokenizerError, match=r"cannot read .*tokenizer_config.json"):
        Tokenizer.from_directory(directory)


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer: none of tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        Tokenizer.from_directory(tmp_path / "absent")


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
    configure(tmp_path, add_bos_token=False, add_eos_token=True, eos_token="<eot>")
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


def test_vocabulary_and_merges_go_through_transformers(directory: Path) -> None:
    model = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]
    (directory / "tokenizer.json").unlink()
    ids = model["vocab"] | {"<|endoftext|>": 257}
    (directory / "vocab.json").write_text(json.dumps(ids))
    (directory / "merges.txt").write_text("#version: 0.2\na b\n")
    configure(directory, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("ab<|endoftext|>") == [256, 257]
    assert tokenizer.eos_token_ids == (257,)


def test_what_transformers_cannot_convert(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text("{")
    configure(directory, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(TokenizerError, match=r"cannot convert .*vocab.json"):
        Tokenizer.from_directory(directory)


USER = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("files", [True, False])
def test_places_a_template_can_be(directory: Path, files: bool) -> None:
    configure(directory, chat_template="config")
    (directory / "chat_template.json").write_text('{"chat_template": "json"}')
    if files:
        (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(directory).chat_template == ("file" if files else "config")
    configure(directory)
    assert Tokenizer.from_directory(directory).chat_template == ("file" if files else "json")


def test_list_of_templates(directory: Path) -> None:
    entries = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    configure(directory, chat_template=entries)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(USER) == "d"
    assert tokenizer.apply_chat_template(USER, tools=[]) == "d"
    assert tokenizer.apply_chat_template(USER, tools=[{"type": "function"}]) == "t"
    assert tokenizer.apply_chat_template(USER, chat_template="tool_use") == "t"
    assert tokenizer.apply_chat_template(USER, chat_template="{{ 1 + 1 }}") == "2"
    configure(directory, chat_template=entries[:1])
    assert Tokenizer.from_directory(directory).chat_template == "d"
    configure(directory, chat_template=entries[1:])
    with pytest.raises(ChatTemplateError, match=r"none named 'default'.*tool_use"):
        Tokenizer.from_directory(directory).apply_chat_template(USER)


def test_additional_templates_folder(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("d")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("r")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(USER) == "d"
    assert tokenizer.apply_chat_template(USER, chat_template="rag") == "r"


def test_no_chat_template_is_a_clear_error(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory, name="base-model")
    with pytest.raises(ChatTemplateError, match="base-model has no chat template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.apply_chat_template(USER, chat_template="own") == "own"
    assert tokenizer.encode("ab") == [256]


def test_exactly_one_bos(directory: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    configure(
        directory,
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
        chat_template=template,
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("ab") == [257, 256]
    assert tokenizer.encode_chat(USER) == [257, 256, 258]
    assert tokenizer.encode_chat(USER, add_special_tokens=True) == [257, 256, 258]
    without = {"chat_template": "{{ messages[0].content }}"}
    assert tokenizer.encode_chat(USER, **without) == [256]
    assert tokenizer.encode_chat(USER, add_special_tokens=True, **without) == [257, 256]
