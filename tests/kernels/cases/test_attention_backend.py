"""A model over the kernels gives the logits that it gives over torch's attention."""

from dataclasses import replace

import pytest
import torch

import model_helpers
from miniinfer.attention import TorchAttention
from miniinfer.attention_triton import TritonAttention
from miniinfer.model.config import ModelConfig
from miniinfer.model.kv_cache import KVCache
from miniinfer.model.llama import LlamaModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=model_helpers.VOCAB_SIZE,
    max_position_embeddings=256,
    sliding_windows=(None, 7),
    qk_norm=True,
)


def random_model(dtype=torch.float32):
    return model_helpers.with_random_weights(LlamaModel(CONFIG, dtype, DEVICE))


def run_steps(make_attention, dtype=torch.float32):
    """Logits of prefills in chunks beside decodes, over a shuffled cache full of NaN."""
    runner = model_helpers.PagedRunner(random_model(dtype), block_size=8, num_tokens=512)
    runner.model.attention = make_attention(runner.cache)
    tokens = model_helpers.random_tokens(200, seed=2)
    steps = [
        {"a": tokens[:20], "b": tokens[50:51]},
        {"a": tokens[51:52], "b": tokens[52:53], "c": tokens[53:60]},
        {"c": tokens[60:61], "a": tokens[61:70], "b": tokens[94:95]},
        {"a": tokens[95:96], "b": tokens[96:97], "c": tokens[97:98]},
    ]
    return [runner.step(step)[name] for step in steps for name in sorted(step)]


@pytest.mark.parametrize("num_splits", [None, 3])
def test_logits_are_those_of_torch_attention(num_splits):
    expected = run_steps(TorchAttention)
    actual = run_steps(lambda cache: TritonAttention(cache, num_splits=num_splits))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_cache_of_8_bits_gives_nearly_the_same():
    def over_8_bits(cache):
        sizes = (cache.num_blocks, cache.block_size, CONFIG.num_kv_heads, CONFIG.head_dim)
        scales = [(0.05, 0.05)] * CONFIG.num_layers
        small = KVCache(CONFIG.num_layers, *sizes, torch.float8_e4m3fn, DEVICE, scales)
        for tensor in small.keys + small.values:
            tensor.view(torch.uint8).fill_(0x7F)
        return TritonAttention(small)

    expected = run_steps(TorchAttention)
    for ours, theirs in zip(run_steps(over_8_bits), expected, strict=True):
        assert ours.isfinite().all()
        cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
        assert cosine.min() > 0.97


def test_prepare_costs_nothing():
    runner = model_helpers.PagedRunner(random_model())
    batch, _ = runner.batch({"a": [1, 2, 3]})
    attention = TritonAttention(runner.cache)
    assert attention.prepare(batch, CONFIG.sliding_windows) is batch
    later = replace(batch, num_decodes=0)
    assert attention.prepare(later, ()) is later
