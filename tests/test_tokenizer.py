"""The tokenizer's API, and tokenizers from directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from miniinfer.chat_template import ChatTemplateError
from miniinfer.source import ModelSource
from miniinfer.tokenizer import Tokenizer, TokenizerError
from tiny import write_tokenizer

TEXTS = json.loads((Path(__file__).parent / "data" / "tokenizer_texts.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def builtin(builtin_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(builtin_gguf)


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


def test_imports_stay_light() -> None:
    heavy = ("torch", "transformers", "jinja2", "huggingface_hub", "numpy")
    code = (
        "import sys, miniinfer.tokenizer, miniinfer.source, miniinfer.fetch\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    package = Path(sys.modules["miniinfer.tokenizer"].__file__ or "").parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output == "[]\n"


def test_json_is_the_same_tokenizer(builtin: Tokenizer) -> None:
    copy = Backend.from_str(builtin.json().decode())
    for text in TEXTS:
        assert copy.encode(text).ids == builtin.encode(text)


def test_batch_and_threads_agree_with_single(builtin: Tokenizer) -> None:
    expected = [builtin.encode(text) for text in TEXTS]
    assert builtin.encode_batch(TEXTS) == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(builtin.encode, TEXTS)) == expected


def test_ids_without_text_decode_to_nothing(builtin: Tokenizer) -> None:
    assert builtin.decode([]) == ""
    hello = builtin.encode("Hello")
    assert builtin.decode([*hello, 49152, 2**31]) == "Hello"
    assert builtin.decode([-1, *hello, 2**40]) == "Hello"


def test_lone_surrogates_become_replacement_characters(builtin: Tokenizer) -> None:
    assert builtin.decode(builtin.encode("a\ud83db")) == "a\ufffdb"
    assert builtin.decode(builtin.encode("\ud83d\ude00")) == "😀"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with the same small vocabulary and no chat template."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
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


def test_a_long_text_leaves_other_threads_their_time(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "to be or not " * 20_000
    turns = 0
    stop = threading.Event()

    def count():
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        started = turns
        ids = tokenizer.encode(text)
        encoded = turns
        again = tokenizer.decode(ids)
        decoded = turns
    finally:
        stop.set()
        counter.join()
    assert again == text
    # A thread that is kept out gets the few turns before and after the call at most.
    assert encoded - started > 100
    assert decoded - encoded > 100


@pytest.mark.parametrize("size", [1022, 1023, 1024, 1025, 5000])
def test_long_and_short_are_encoded_alike(tmp_path, size):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = ("é<eos> \U0001f600a" * size)[:size]
    ids = tokenizer.encode(text)
    assert ids == tokenizer._backend.encode(text).ids
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.decode([*ids, 2**40, -1], False) == text
