"""Whole engines over the kernels give the tokens that they give over torch."""

import pytest
import torch

import tiny
from engines import greedy, make_llm
from miniinfer import SamplingParams
from miniinfer.attention_triton import TritonAttention
from miniinfer.kernels import sample
from miniinfer.model.triton_ops import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED = list(range(30, 43))
PROMPTS = [[1], [*SHARED, 5], [*SHARED, 9, 8, 7, 6, 5], [7] * 9]
# Of Qwen3's kind: norms of heads; and in the second layer a window that its contexts outgrow.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny.write_tiny_llama(tmp_path_factory.mktemp("engine") / "qwen3", **QWEN3)


def run(folder, backend, params, **settings):
    """Tokens and log probabilities, twice: the second time with the prefixes cached."""
    sizes = {"max_num_batched_tokens": 11, "dtype": "float32", "device": DEVICE} | settings
    llm = make_llm(folder, attention_backend=backend, **sizes)
    found = [[o.outputs[0] for o in llm.generate(PROMPTS, params)] for _ in range(2)]
    assert llm.get_metrics()["prefix_cache_hits"] > 0
    return llm, [output for outputs in found for output in outputs]


def assert_same(folder, params, **settings):
    _, expected = run(folder, "torch", params, **settings)
    llm, actual = run(folder, "triton", params, **settings)
    assert [output.token_ids for output in actual] == [output.token_ids for output in expected]
    return llm, actual, expected


@pytest.mark.parametrize("family", ["tiny_model", "qwen3"])
def test_greedy_tokens_are_those_of_torch(family, request):
    """Prompts in chunks of 11 tokens beside decodes, prefixes shared and cached."""
    llm, *_ = assert_same(request.getfixturevalue(family), greedy(5))
    model = llm.llm_engine.engine.model
    assert isinstance(model.attention, TritonAttention)
    assert isinstance(model.ops, TritonOps)
    assert llm.llm_engine.engine.runner._sample is sample


def test_sampled_tokens_and_logprobs_are_those_of_torch(qwen3):
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.5,
        logit_bias={5: 2.0},
        seed=3,
        max_tokens=4,
        logprobs=2,
        ignore_eos=True,
    )
    _, actual, expected = assert_same(qwen3, params)
    for ours, theirs in zip(actual, expected, strict=True):
        for at, (mine, other) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            assert mine.keys() == other.keys()
            token = ours.token_ids[at]
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
            assert mine[token].rank == other[token].rank


def test_a_cache_of_8_bits_is_read_as_it_is_over_torch(qwen3):
    llm, *_ = assert_same(qwen3, greedy(4), kv_cache_dtype="fp8")
    assert llm.llm_engine.engine.runner.cache.keys[0].dtype is torch.float8_e4m3fn
