"""Configurations and weights of Hugging Face directories, whole and damaged."""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import torch

from miniinfer.model import ModelLoadError, load_model, read_model_config
from miniinfer.model.hf_config import hf_model_config
from model_helpers import (
    TINY,
    PagedRunner,
    one_thread,  # noqa: F401 -- a fixture
    random_tokens,
    reference_logits,
    save,
    tiny_model,
)

LLAMA = TINY | {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def llama(tmp_path):
    """(transformers model, its directory)"""
    reference = tiny_model("llama")
    return reference, save(reference, tmp_path)


def rewrite(directory, change):
    """Change the tensors of a saved model: `change` edits a dict of them in place."""
    path = directory / "model.safetensors"
    tensors = dict(safetensors.torch.load_file(path))
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def reconfigure(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_same_logits(directory, reference):
    tokens = random_tokens(20)
    got = PagedRunner(load_model(directory), 8).run(tokens, [20])
    torch.testing.assert_close(got, reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_sharded_checkpoint(tmp_path):
    reference = tiny_model("qwen3", head_dim=16)
    save(reference, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(tmp_path, reference)


def test_tied_head_without_a_tensor_is_the_embedding(tmp_path):
    reference = tiny_model("llama", tie_word_embeddings=True)
    save(reference, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None))
    assert_same_logits(tmp_path, reference)


def test_tied_head_with_a_tensor_ignores_it(tmp_path):
    reference = tiny_model("llama", tie_word_embeddings=True)
    save(reference, tmp_path)
    wrong = torch.full((TINY["vocab_size"], TINY["hidden_size"]), 7.0)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": wrong}))
    assert_same_logits(tmp_path, reference)


def test_untied_head_without_a_tensor_is_refused(llama):
    _, directory = llama
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' is missing and tie_word_embed"):
        load_model(directory)


def test_unexpected_tensors_are_ignored(llama):
    reference, directory = llama
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(directory, lambda tensors: tensors.update(extra))
    assert_same_logits(directory, reference)


def test_names_without_the_model_prefix(llama):
    reference, directory = llama

    def strip(tensors):
        stripped = {name.removeprefix("model."): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(stripped)

    rewrite(directory, strip)
    assert_same_logits(directory, reference)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_types_are_converted(llama, stored):
    _, directory = llama

    def convert(tensors):
        for name, value in tensors.items():
            tensors[name] = value.to(stored)

    rewrite(directory, convert)
    expected = safetensors.torch.load_file(directory / "model.safetensors")
    model = load_model(directory)
    assert model.dtype == torch.float32
    assert torch.equal(model.embedding, expected["model.embed_tokens.weight"].float())
    names = [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]
    stacked = torch.cat([expected[name] for name in names]).float()
    assert torch.equal(model.layers[1].qkv, stacked)


def test_progress_is_reported_to_the_end(llama):
    calls = []
    model = load_model(llama[1], progress=lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {model.num_bytes}
    done = [part for part, _ in calls]
    assert done == sorted(done)
    assert done[-1] == model.num_bytes


def test_progress_bar_is_drawn_when_asked(llama, capsys):
    load_model(llama[1], progress=True)
    assert "loading weights" in capsys.readouterr().err
    load_model(llama[1])
    assert capsys.readouterr().err == ""


def test_missing_shard_is_named(tmp_path):
    save(tiny_model("llama"), tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        ModelLoadError, match=f"{shard.name}: the index names it, but it is missing"
    ):
        load_model(tmp_path)


def test_missing_tensor_is_named(llama):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(llama[1], lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is missing"):
        load_model(llama[1])


def test_wrong_shape_is_named_with_both_shapes(llama):
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(llama[1], lambda tensors: tensors.update({name: torch.zeros(15, 48)}))
    with pytest.raises(ModelLoadError, match=rf"'{name}' has the shape \[15, 48\].*\[16, 48\]"):
        load_model(llama[1])


def test_integer_weights_are_refused(llama):
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = torch.zeros(48, 80, dtype=torch.int8)
    rewrite(llama[1], lambda tensors: tensors.update({name: wrong}))
    with pytest.raises(ModelLoadError, match=f"'{name}' has the type I8"):
        load_model(llama[1])


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused(llama, kept):
    path = llama[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(llama[1])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../model.safetensors"}}', "\xff"],
)
def test_damaged_index_is_refused(llama, content):
    _, directory = llama
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json|is missing"):
        load_model(directory)


def test_pickled_weights_alone_are_refused(llama):
    _, directory = llama
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has neither model\.safetensors nor .*\.bin files"):
        load_model(directory)


def test_configuration_larger_than_the_weights_takes_no_memory(llama):
    reconfigure(llama[1], vocab_size=2**31 - 1, intermediate_size=2**31 - 1)
    with pytest.raises(ModelLoadError, match=r"asks for \[2147483647, 48\]"):
        load_model(llama[1])
    reconfigure(llama[1], vocab_size=97, num_hidden_layers=2000)
    with pytest.raises(ModelLoadError, match=r"is missing|asks for"):
        load_model(llama[1])


def test_allocation_that_fails_is_one_clear_error(llama):
    with pytest.raises(ModelLoadError, match="no room for the weights on cpu: "):
        load_model(llama[1], max_positions=2**60)


@pytest.mark.parametrize("name", ["absent", "absent.gguf"])
def test_missing_path(tmp_path, name):
    with pytest.raises(ModelLoadError, match=f"{name}: no such file or directory"):
        load_model(tmp_path / name)


def test_directory_without_a_configuration(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: No such file"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_configuration(llama, content):
    (llama[1] / "config.json").write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=r"config\.json: (not valid JSON|must hold a JSON obj)"
    ):
        load_model(llama[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*supported: LlamaForCausalLM, Mis",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM', which is not supported"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma', which is not supported"),
        ({"architectures": "Llama"}, "architectures must be a list of names, not 'Llama'"),
        ({"hidden_act": "gelu"}, "hidden_act of 'gelu' is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config with method 'gptq'",
        ),
        ({"num_local_experts": 8}, "num_local_experts of 8: mixtures of experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of 0.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size must be a positive integer, not '48'"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers of 1000000000 exceeds the limit of 10000",
        ),
        ({"vocab_size": 2**40}, "vocab_size of 1099511627776 exceeds the limit"),
        ({"num_key_value_heads": 4}, "4 key-value heads do not divide the 6 attention heads"),
        ({"head_dim": 7}, "even head size of 4 or more, not 7"),
        ({"head_dim": 2}, "even head size of 4 or more, not 2"),
        ({"rope_theta": 1}, "base above 1, not 1.0"),
        ({"dtype": ["float16"]}, "dtype must be a string"),
        ({"hidden_size": 3}, "even head size of 4 or more, not 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive finite number, not -1"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive finite number, not inf"),
        ({"rope_theta": "big"}, "rope_theta must be a number, not 'big'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must hold token ids, not -1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type of 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "factor must be a positive finite"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor of 4.0 must be below high_freq_factor, 4.0",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor of 0.25"),
    ],
)
def test_unsupported_settings_are_named(values, message):
    with pytest.raises(ModelLoadError, match=f"config.json: .*{message}"):
        hf_model_config(LLAMA | values, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["chunked"] * 3}, "layer_types must be a list of full_attention and"),
        ({"max_window_layers": "two"}, "max_window_layers must be an integer, not 'two'"),
    ],
)
def test_unsupported_windows_are_named(values, message):
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    with pytest.raises(ModelLoadError, match=message):
        hf_model_config(qwen | values, {})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, [2, 7], (2, 7)),
        ([5, 2], 7, (5, 2, 7)),
        (None, [0], (0,)),
        (None, None, ()),
    ],
)
def test_end_ids_come_from_both_files(config, generation, expected):
    got = hf_model_config(LLAMA | {"eos_token_id": config}, {"eos_token_id": generation})
    assert got.eos_token_ids == expected


def test_generation_config_is_read_from_the_directory(llama):
    (llama[1] / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert read_model_config(llama[1]).eos_token_ids == (2, 9)
    (llama[1] / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        read_model_config(llama[1])


def test_rope_settings_of_either_style_are_the_same():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    older = hf_model_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling}, {})
    newer_rope = scaling | {"rope_theta": 5e5}
    newer = hf_model_config(LLAMA | {"rope_theta": None, "rope_parameters": newer_rope}, {})
    assert older.rope == newer.rope
    assert older.rope.theta == 5e5
    assert older.rope.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_longest_sequence(scaling, expected):
    assert hf_model_config(LLAMA | {"rope_scaling": scaling}, {}).max_model_len == expected


def test_windows_by_family():
    def windows(name, **values):
        config = TINY | {"architectures": [f"{name}ForCausalLM"]} | values
        return hf_model_config(config, {}).sliding_windows

    assert windows("Llama", sliding_window=5) == (None, None, None)
    assert windows("Mistral") == (4096, 4096, 4096)
    assert windows("Mistral", sliding_window=None) == (None, None, None)
    assert windows("Qwen2", sliding_window=5) == (None, None, None)
    qwen = {"use_sliding_window": True, "sliding_window": 5}
    assert windows("Qwen2", **qwen) == (None, None, None)  # the first 28 layers see all
    assert windows("Qwen3", **qwen, max_window_layers=2) == (None, None, 5)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3", **qwen, layer_types=types) == (5, None, 5)


def test_families_differ_in_biases_and_norms():
    def config(name, **values):
        return hf_model_config(TINY | {"architectures": [f"{name}ForCausalLM"]} | values, {})

    llama = config("Llama", attention_bias=True)
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (
        True,
        True,
        False,
    )
    qwen2 = config("Qwen2")
    assert (qwen2.attention_bias, qwen2.attention_output_bias) == (True, False)
    qwen3 = config("Qwen3")
    assert (qwen3.qk_norm, qwen3.attention_bias, qwen3.head_dim) == (True, False, 128)
