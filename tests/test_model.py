"""The forward pass against transformers: every family, chunking, batch and block layout."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from miniinfer import attention
from miniinfer.model import KVCache, KVCacheError, bytes_per_block, load_model
from miniinfer.model.config import RopeConfig
from miniinfer.model.hf_config import hf_model_config
from miniinfer.model.rope import rotary_table
from model_helpers import (
    TINY,
    PagedRunner,
    one_thread,  # noqa: F401 -- a fixture
    random_tokens,
    reference_decode_logits,
    reference_logits,
    save,
    tiny_model,
)

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """name -> (transformers model, ours), made when first asked for."""
    made = {}

    def get(name):
        if name not in made:
            family, overrides = FAMILIES[name]
            reference = tiny_model(family, **overrides)
            directory = save(reference, tmp_path_factory.mktemp(name))
            made[name] = reference, load_model(directory, progress=False)
        return made[name]

    return get


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_chunks_and_decodes_equal_transformers(families, name, block_size):
    reference, model = families(name)
    tokens = random_tokens(53)
    expected = reference_logits(reference, tokens)
    for chunk_sizes in ([53], [7, 1, 13, 2, 5], [16, 32, 1], [1]):
        got = PagedRunner(model, block_size).run(tokens, chunk_sizes)
        assert_close(got, expected)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_mixed_batches_equal_transformers(families, name):
    reference, model = families(name)
    sequences = {
        f"s{index}": random_tokens(length, seed=index)
        for index, length in enumerate([3, 90, 17, 41, 2, 64, 1])
    }
    runner = PagedRunner(model, block_size=4)
    generator = np.random.default_rng(5)
    done = dict.fromkeys(sequences, 0)
    parts = {key: [] for key in sequences}
    while any(done[key] < len(tokens) for key, tokens in sequences.items()):
        chunks = {}
        for key, tokens in sequences.items():
            # About half of the chunks are decodes, and a sequence may sit out a step.
            size = int(generator.choice([0, 1, 1, 2, 11]))
            piece = tokens[done[key] : done[key] + size]
            if piece:
                chunks[key] = piece
                done[key] += len(piece)
        if chunks:
            for key, logits in runner.step(chunks).items():
                parts[key].append(logits)
    for key, tokens in sequences.items():
        assert_close(torch.cat(parts[key]), reference_logits(reference, tokens))


def test_decodes_of_very_different_lengths_equal_transformers(families):
    reference, model = families("llama")
    lengths = [1, 2, 200, 30, 9, 100, 3]
    sequences = {f"s{i}": random_tokens(n + 1, seed=i) for i, n in enumerate(lengths)}
    runner = PagedRunner(model, block_size=8)
    runner.step({key: tokens[:-1] for key, tokens in sequences.items()})
    got = runner.step({key: tokens[-1:] for key, tokens in sequences.items()})
    for key, tokens in sequences.items():
        assert_close(got[key], reference_logits(reference, tokens)[-1:])


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_bounded_pieces_give_the_same_result(families, name, monkeypatch):
    """Splitting a batch's decodes and a chunk's queries to bound memory changes nothing."""
    reference, model = families(name)
    monkeypatch.setattr(attention, "_GATHER_ELEMENTS", 40 * 16)
    monkeypatch.setattr(attention, "_MASKED_QUERIES", 3)
    sequences = {f"s{i}": random_tokens(n, seed=i) for i, n in enumerate([25, 31, 28, 45])}
    runner = PagedRunner(model, block_size=4)
    runner.step({key: tokens[:-12] for key, tokens in sequences.items()})
    runner.step({key: tokens[-12:-1] for key, tokens in sequences.items()})
    got = runner.step({key: tokens[-1:] for key, tokens in sequences.items()})
    for key, tokens in sequences.items():
        assert_close(got[key], reference_logits(reference, tokens)[-1:])


def test_a_request_does_not_depend_on_its_companions(families):
    _, model = families("qwen2-window")
    tokens = random_tokens(40, seed=1)
    alone = PagedRunner(model, 8).run(tokens, [20, 1])
    runner = PagedRunner(model, 8, seed=3)
    runner.step({"x": random_tokens(70, seed=2)})
    parts = [runner.step({"a": tokens[:20], "x": [3], "y": random_tokens(5)})["a"]]
    parts += [runner.step({"y": [4], "a": [token], "x": [5]})["a"] for token in tokens[20:]]
    torch.testing.assert_close(torch.cat(parts), alone, atol=1e-5, rtol=0)


def test_shared_blocks_are_read_by_both_sequences(families):
    """A prefix hit: a second sequence continues on the first one's blocks."""
    reference, model = families("llama")
    prefix, tail = random_tokens(16), random_tokens(5, seed=9)
    runner = PagedRunner(model, 8)
    runner.step({"a": [*prefix, 1, 2, 3]})
    runner.step({"b": [7]})
    first, second = runner.sequences["a"], runner.sequences["b"]
    second.blocks, second.length = first.blocks[:2], 16
    runner.block_table[second.row, :2] = first.blocks[:2]
    got = runner.step({"b": tail, "a": [4]})
    assert_close(got["b"], reference_logits(reference, prefix + tail)[16:])
    assert_close(got["a"], reference_logits(reference, [*prefix, 1, 2, 3, 4])[-1:])


def test_logits_are_of_the_tokens_asked_for(families):
    reference, model = families("llama")
    tokens = random_tokens(12)
    runner = PagedRunner(model, 4)
    batch, _ = runner.batch({"a": tokens})
    hidden = model.forward(batch)
    assert hidden.shape == (12, TINY["hidden_size"])
    got = model.logits(hidden, torch.tensor([11, 0, 11], dtype=torch.int32))
    assert_close(got, reference_logits(reference, tokens)[[11, 0, 11]])
    assert model.logits(hidden, torch.tensor([], dtype=torch.int32)).shape == (0, 97)


def test_bfloat16_stays_near_float32(families, tmp_path):
    reference, _ = families("qwen3")
    model = load_model(save(reference, tmp_path), dtype=torch.bfloat16)
    tokens = random_tokens(30)
    got = PagedRunner(model, 8).run(tokens, [9, 1, 20])
    expected = reference_logits(reference, tokens)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_sequence_beyond_the_rotary_table_is_refused(families, tmp_path):
    reference, _ = families("llama")
    model = load_model(save(reference, tmp_path), max_positions=10)
    PagedRunner(model, 4).run(random_tokens(10), [10])
    with pytest.raises(ValueError, match=r"11 tokens exceeds the model's 10 positions"):
        PagedRunner(model, 4).run(random_tokens(11), [11])


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "yarn": YARN | {"original_max_position_embeddings": 4096},
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [64, 8])
def test_rotation_at_long_positions_equals_transformers(name, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = TINY | {"max_position_embeddings": 16384, "head_dim": head_dim}
    values["rope_parameters"] = dict(ROPES[name])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    config = hf_model_config(values | {"architectures": ["LlamaForCausalLM"]}, {})
    table = rotary_table(config.rope, head_dim, 16384)
    positions = torch.tensor([[0, 1, 1000, 4095, 8192, 16383]])
    cosines, sines = theirs(torch.zeros(1), positions)
    expected = torch.cat((cosines[0, :, : head_dim // 2], sines[0, :, : head_dim // 2]), dim=-1)
    # One unit in the last place of a frequency is 1e-3 radians at position 16383.
    torch.testing.assert_close(table[positions[0]], expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(table[:1001][positions[0, :3]], expected[:3], atol=2e-4, rtol=0)


def test_dynamic_scaling_beyond_the_original_length_decodes_as_transformers(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    reference = tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)
    model = load_model(save(reference, tmp_path))
    assert model.config.max_model_len == 96
    tokens = random_tokens(60)
    expected = reference_decode_logits(reference, tokens)
    assert_close(PagedRunner(model, 8).run(tokens, [1]), expected)
    # The rotation depends on the position alone, so other chunks give the same.
    assert_close(PagedRunner(model, 8).run(tokens, [40, 20]), expected)


def test_dynamic_scaling_matters():
    rope = RopeConfig(kind="dynamic", factor=4.0, original_max_position_embeddings=24)
    table = rotary_table(rope, 16, 96)
    plain = rotary_table(RopeConfig(), 16, 96)
    assert torch.equal(table[:24], plain[:24])
    assert not torch.isclose(table[40:], plain[40:]).all()


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([5, 5, 5], 100, [[0, 1, 2]]),
        ([5, 10, 7], 100, [[1, 2, 0]]),
        ([1, 100, 51, 50, 49], 1000, [[1, 2, 3], [4], [0]]),
        ([8, 8, 8, 8, 8], 16, [[0, 1], [2, 3], [4]]),
        ([500, 1], 16, [[0], [1]]),
    ],
)
def test_grouping_by_length(lengths, max_tokens, expected):
    groups = attention._group_by_length(np.array(lengths, np.int32), max_tokens)
    assert [group.tolist() for group in groups] == expected


def test_grouping_covers_each_request_once_within_its_bounds():
    generator = np.random.default_rng(0)
    for _ in range(200):
        lengths = generator.integers(1, 400, generator.integers(1, 40)).astype(np.int32)
        groups = attention._group_by_length(lengths, 900)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        for group in groups:
            longest = lengths[group].max()
            assert len(group) == 1 or len(group) * longest <= 900
            assert lengths[group].min() * 2 >= longest


def test_cache_size_is_what_bytes_per_block_says():
    cache = KVCache(3, 5, 16, 2, 8, torch.bfloat16, "cpu")
    held = sum(tensor.nbytes for tensor in cache.keys + cache.values)
    assert cache.num_bytes == held == 5 * bytes_per_block(3, 16, 2, 8, torch.bfloat16)
    assert cache.keys[0].shape == (5, 16, 2, 8)


@pytest.mark.parametrize("num_blocks", [10**8, 10**15])
def test_cache_that_cannot_fit_is_refused_with_the_numbers(num_blocks):
    with pytest.raises(KVCacheError) as raised:
        KVCache(32, num_blocks, 16, 8, 128, torch.float32, "cpu")
    message = str(raised.value)
    gib = num_blocks * 32 * 2 * 16 * 8 * 128 * 4 / 2**30
    for part in (
        f"{num_blocks} blocks of 16",
        f"{gib:.1f} GiB",
        "num_kv_blocks",
        "kv_cache_memory",
    ):
        assert part in message


def test_cache_refused_by_the_allocator_is_the_same_error(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        KVCacheError, match=r"cpu refused it \(CUDA out of memory\. .*num_kv_blocks"
    ):
        KVCache(1, 4, 4, 1, 8, torch.float32, "cpu")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_cache_without_room_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"not {num_blocks} blocks of {block_size}"):
        KVCache(1, num_blocks, block_size, 1, 8, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("miniinfer.gguf_file", ["torch", "gguf", "transformers"]),
        ("miniinfer.attention", ["gguf", "transformers"]),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
