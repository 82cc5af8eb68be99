"""GGUF: the parser on whole and hostile files, the block formats, and whole models."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch

from gguf_reference import transformers_from_gguf
from miniinfer.gguf_file import GGMLType, GGUFError, GGUFFile
from miniinfer.model import ModelLoadError, load_model, read_model_config
from miniinfer.model.dequantize import _CONVERTERS, dequantize
from model_helpers import (
    PagedRunner,
    gguf_name,
    one_thread,  # noqa: F401 -- a fixture
    random_tokens,
    reference_logits,
    tiny_model,
    write_gguf,
)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(key: str | bytes, type_code: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_code) + payload


def tensor(name: str, dimensions: list[int], type_code: int, offset: int) -> bytes:
    layout = f"<I{len(dimensions)}QIQ"
    return string(name) + struct.pack(layout, len(dimensions), *dimensions, type_code, offset)


def header(values: int, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def parse(tmp_path, content: bytes) -> GGUFFile:
    """Open, and look at everything."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    file = GGUFFile(path)
    dict(file.metadata)
    for item in file.tensors.values():
        item.data.sum()
    return file


def test_every_value_type_reads_back(tmp_path):
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected = {"general.architecture": "llama"}
    numbers = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 1e300,
        "bool": True,
        "string": "naïve 😀",
    }
    for kind, number in numbers.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", number)
        expected[f"k.{kind}"] = number
    arrays = {"ints": [1, -2, 3], "floats": [0.5, -1.5], "texts": ["", "a", "日本"]}
    arrays |= {"flags": [True, False], "nested": [["a"], ["b", "c"]]}
    for key, items in arrays.items():
        writer.add_array(key, items)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GGUFFile(path)
    assert dict(file.metadata) == expected | arrays
    assert file.version == 3
    assert len(file.metadata) == len(expected | arrays)
    assert "absent" not in file.metadata
    assert file.metadata.get("absent", 5) == 5
    with pytest.raises(KeyError):
        file.metadata["absent"]


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_tensors_read_back_at_any_alignment(tmp_path, alignment):
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    generator = np.random.default_rng(0)
    arrays = {
        "one": generator.normal(size=5).astype(np.float32),
        "two": generator.normal(size=(3, 7)).astype(np.float16),
        "three": generator.normal(size=(2, 3, 5)).astype(np.float32),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GGUFFile(path).tensors
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].data.tobytes() == array.tobytes()
        assert not tensors[name].data.flags.writeable


def test_a_file_without_anything_is_valid(tmp_path):
    file = parse(tmp_path, header(0))
    assert not file.metadata
    assert not file.tensors


def test_version_two_is_read_and_text_that_is_not_utf8_replaced(tmp_path):
    file = parse(tmp_path, header(1, version=2) + value("k", 8, string(b"a\xffb")))
    assert (file.version, file.metadata["k"]) == (2, "a\ufffdb")


HUGE = 2**63
F32_TENSOR = tensor("t", [4], 0, 0)
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "short": (b"GGUF" + bytes(19), "23 bytes"),
    "magic": (b"GGML" + bytes(40), "begins with b'GGML'"),
    "version 1": (header(0, version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "value count": (header(HUGE), f"{HUGE} metadata values"),
    "tensor count": (header(0, HUGE), f"{HUGE} tensors"),
    "value count by one": (header(2) + value("k", 0, b"\1"), "2 metadata values"),
    "key length": (header(1) + struct.pack("<Q", HUGE) + bytes(20), f"has {HUGE} bytes"),
    "key beyond the end": (header(1) + struct.pack("<Q", 100) + bytes(20), "needs 100 bytes"),
    "key not UTF-8": (header(1) + value(b"\xff", 0, b"\1") + bytes(8), "is not UTF-8"),
    "key twice": (header(2) + 2 * value("same", 0, b"\1"), "'same' appears twice"),
    "value type": (header(1) + value("k", 99, bytes(20)), "'k' .* unknown value type 99"),
    "string length": (header(1) + value("k", 8, struct.pack("<Q", HUGE)), f"needs {HUGE} bytes"),
    "array type": (header(1) + value("k", 9, struct.pack("<IQ", 77, 1)), "unknown value type 77"),
    "array count": (
        header(1) + value("k", 9, struct.pack("<IQ", 4, 2**62)),
        f"{2**62} items of 'k'",
    ),
    "string array count": (
        header(1) + value("k", 9, struct.pack("<IQ", 8, HUGE) + bytes(64)),
        f"{HUGE} items of 'k'",
    ),
    "string in an array": (
        header(1) + value("k", 9, struct.pack("<IQQQ", 8, 2, HUGE, 0)),
        "a string of 'k'",
    ),
    "last string in an array": (
        header(1) + value("k", 9, struct.pack("<IQQQ", 8, 2, 0, 2**64 - 1)),
        "the end of 'k'",
    ),
    "array depth": (
        header(1) + value("k", 9, struct.pack("<IQ", 9, 1) * 2000 + bytes(64)),
        "deeper than 4",
    ),
    "wide array of arrays": (
        header(1) + value("k", 9, struct.pack("<IQ", 9, 2**60) + bytes(64)),
        f"{2**60} items of 'k'",
    ),
    "alignment": (
        header(1, 1)
        + value("general.alignment", 4, struct.pack("<I", 24))
        + F32_TENSOR
        + bytes(64),
        "power of two, not 24",
    ),
    "alignment zero": (
        header(1, 1) + value("general.alignment", 4, bytes(4)) + F32_TENSOR + bytes(64),
        "power of two, not 0",
    ),
    "alignment text": (
        header(1, 1) + value("general.alignment", 8, string("x")) + F32_TENSOR + bytes(64),
        "power of two, not 'x'",
    ),
    "tensor twice": (header(0, 2) + 2 * F32_TENSOR + bytes(64), "'t' appears twice"),
    "no dimension": (header(0, 1) + tensor("t", [], 0, 0) + bytes(64), "has 0 dimensions"),
    "dimensions": (header(0, 1) + string("t") + b"\xff" * 4 + bytes(64), "has 4294967295 dim"),
    "tensor cut": (header(0, 1) + F32_TENSOR[:-1], "is truncated or corrupt"),
    "tensor type": (header(0, 1) + tensor("t", [4], 5, 0) + bytes(64), "unknown type 5"),
    "empty tensor": (header(0, 1) + tensor("t", [4, 0], 0, 0) + bytes(64), r"shape \[0, 4\]"),
    "partial block": (header(0, 1) + tensor("t", [33], 8, 0) + bytes(99), "multiple of 32"),
    "huge tensor": (header(0, 1) + tensor("t", [2**62, 2**62], 0, 0) + bytes(64), "data of tensor"),
    "data beyond": (header(0, 1) + tensor("t", [4], 0, 2**40) + bytes(64), "data of tensor 't'"),
    "data cut": (header(0, 1) + F32_TENSOR + bytes(20), "data of tensor 't'"),
    "offset unaligned": (header(0, 1) + tensor("t", [4], 0, 4) + bytes(64), "offset 4, not a mul"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_what_and_where(tmp_path, name):
    content, message = HOSTILE[name]
    with pytest.raises(GGUFError, match=rf"model\.gguf: .*{message}"):
        parse(tmp_path, content)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    model = tiny_model("llama", **sizes)
    write_gguf(path, model, "llama", extra_values={"k.text": "some text"})
    return path.read_bytes()


def test_a_file_cut_anywhere_is_refused(tmp_path, small_file):
    end = GGUFFile(_write(tmp_path, small_file)).tensors["output.weight"]
    assert len(small_file) > 10_000
    assert end.data.nbytes
    for size in [*range(0, 1500, 3), *range(1500, len(small_file) - 32, 1997)]:
        with pytest.raises(GGUFError):
            parse(tmp_path, small_file[:size])


def test_damaged_bytes_never_cause_another_error(tmp_path, small_file):
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(700):
        damaged = bytearray(small_file)
        for _ in range(int(generator.integers(1, 4))):
            place = int(generator.integers(4, 1600))
            damaged[place] = int(generator.choice([0, 1, 8, 9, 127, 128, 255]))
        try:
            parse(tmp_path, bytes(damaged))
        except GGUFError:
            refused += 1
    assert 150 < refused < 700


def _write(tmp_path, content):
    path = tmp_path / "written.gguf"
    path.write_bytes(content)
    return path


def test_a_directory_or_absent_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"absent\.gguf"):
        GGUFFile(tmp_path / "absent.gguf")


def random_blocks(kind: GGMLType, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes whose float16 scales are finite and small."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, kind.block_bytes)).astype(np.uint8)
    offsets = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}
    for offset in offsets[kind.name]:
        scales = generator.uniform(0.5e-4, 2e-4, count).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("kind", list(_CONVERTERS))
@pytest.mark.parametrize("count", [1, 3, 2**18 // 32 + 5])
def test_dequantisation_is_bit_equal_to_the_reference(kind, count):
    data = np.random.default_rng(1).integers(0, 256, count * kind.block_bytes).astype(np.uint8)
    got = np.empty(count * kind.block_elements, np.float32)
    with np.errstate(all="ignore"):  # random scales are now and then infinite
        dequantize(data, kind, got)
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(got.view(np.uint32), expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("kind", [GGMLType.Q2_K, GGMLType.IQ4_NL, GGMLType.TQ2_0])
def test_other_types_are_left_to_the_gguf_package(kind):
    data = np.random.default_rng(1).integers(0, 60, 3 * kind.block_bytes).astype(np.uint8)
    got = np.empty(3 * kind.block_elements, np.float32)
    dequantize(data, kind, got)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    assert np.array_equal(got, expected.reshape(-1))


def test_a_type_nobody_reads_is_refused_by_name():
    data, out = np.zeros(36, np.uint8), np.empty(9, np.float32)
    with pytest.raises(GGUFError, match="the type I32 cannot be dequantised"):
        dequantize(data, GGMLType.I32, out)


def test_block_layouts_are_those_of_the_gguf_package():
    for kind in GGMLType:
        reference = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
        assert (kind.block_elements, kind.block_bytes) == reference
        assert gguf.GGMLQuantizationType[kind.name] == kind


ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral3": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def assert_same_logits(path, reference, rtol=0.0):
    tokens = random_tokens(25)
    got = PagedRunner(load_model(path), 8).run(tokens, [11, 1])
    torch.testing.assert_close(got, reference_logits(reference, tokens), atol=1e-4, rtol=rtol)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whole_models_equal_transformers(tmp_path, name):
    family, overrides = ARCHITECTURES[name]
    reference = tiny_model(family, **overrides)
    path = write_gguf(tmp_path / "model.gguf", reference, name.partition("-")[0])
    assert_same_logits(path, reference)
    config = read_model_config(path)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings == overrides.get("tie_word_embeddings", False)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_quantised_models_equal_transformers_with_the_same_weights(tmp_path, architecture, kind):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    reference = tiny_model(architecture, **sizes, **heads)
    raw_kind = gguf.GGMLQuantizationType[kind]
    blocks = None
    if kind.endswith("K"):
        blocks = {
            gguf_name(name): random_blocks(
                GGMLType[kind], value.numel() // 256, seed=index
            ).reshape(len(value), -1)
            for index, (name, value) in enumerate(reference.state_dict().items())
            if value.dim() == 2
        }
    path = write_gguf(tmp_path / "model.gguf", reference, architecture, kind, blocks=blocks)
    # The reference takes the file's own numbers, read and laid out independently of the loader.
    tensors = {item.name: item for item in gguf.GGUFReader(path).tensors}
    for name, parameter in reference.state_dict().items():
        item = tensors[gguf_name(name)]
        if item.tensor_type != raw_kind:
            continue
        numbers = gguf.quants.dequantize(item.data, raw_kind).reshape(parameter.shape)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            pairs = numbers.reshape(-1, 32, 2, 256)  # head, pair, member
            numbers = pairs.swapaxes(1, 2).reshape(parameter.shape)
        parameter.copy_(torch.from_numpy(numbers.copy()))
    assert_same_logits(path, reference, rtol=1e-4)


def test_rope_factors_of_the_file_are_used(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = tiny_model("llama", rope_parameters=rope, tie_word_embeddings=True)
    plain = 1.0 / 10000.0 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    factors = plain / reference.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 2
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", reference, "llama", extra_tensors=extra)
    assert_same_logits(path, reference)


@pytest.mark.parametrize(
    ("factors", "message"),
    [([1.0, 2.0], r"shape \[2\], expected \[4\]"), ([1.0, 0.0, 1.0, 1.0], "positive, not 0")],
)
def test_unusable_rope_factors_are_refused(tmp_path, factors, message):
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", extra_tensors=extra)
    with pytest.raises(ModelLoadError, match=f"'rope_freqs.weight'.*{message}"):
        load_model(path)


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, {"rope_type": "linear"}),
        ({"rope.scale_linear": 3.0}, {"rope_type": "linear"}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 3.0,
                "rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(tmp_path, values, rope):
    rope = {"rope_theta": 10000.0, "factor": 3.0} | rope
    reference = tiny_model("qwen2", rope_parameters=rope)
    extra = {f"qwen2.{key}": value for key, value in values.items()}
    path = write_gguf(tmp_path / "model.gguf", reference, "qwen2", extra_values=extra)
    assert_same_logits(path, reference)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count of 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count must equal the head size, 8"),
        ({"split.count": 3}, "split.count of 3: split files are not supported"),
    ],
)
def test_unsupported_metadata_is_named(tmp_path, values, message):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", extra_values=values)
    with pytest.raises(ModelLoadError, match=f"m.gguf: .*{message}"):
        load_model(path)


def test_unknown_architecture_lists_the_supported(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "gpt2")
    with pytest.raises(ModelLoadError, match=r"'gpt2' is not supported \(supported: llama, mis"):
        load_model(path)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path):
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    content = path.read_bytes()
    assert content.count(b"blk.1.ffn_up.weight") == 1
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"
    ):
        load_model(path)
    path.write_bytes(content.replace(b"token_embd.weight", b"token_embx.weight"))
    with pytest.raises(ModelLoadError, match=r"'token_embd\.weight' is missing"):
        load_model(path)
    model.config.intermediate_size = 79
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    with pytest.raises(ModelLoadError, match=r"has the shape \[48, 80\].* asks for \[48, 79\]"):
        load_model(path)


def test_a_type_nobody_reads_is_refused_at_loading(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama")
    content = path.read_bytes()
    name = b"blk.0.ffn_gate.weight"
    place = content.index(name) + len(name) + 4 + 16
    as_integers = struct.pack("<I", GGMLType.I32)
    path.write_bytes(content[:place] + as_integers + content[place + 4 :])
    expected = r"m\.gguf: tensor 'blk\.0\.ffn_gate\.weight': the type I32 cannot be dequantised"
    with pytest.raises(GGUFError, match=expected):
        load_model(path)


def test_the_builtin_model_equals_transformers(builtin_gguf):
    model = load_model(builtin_gguf)
    config = model.config
    assert config.eos_token_ids == (2,)
    reference = transformers_from_gguf(builtin_gguf)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 40).tolist()
    got = PagedRunner(model, 16).run(tokens, [23, 1, 16])
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
