"""Models on the kernels for CPUs, beside the same models in torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from miniinfer import LLM, EngineArgs, SamplingParams
from miniinfer.cpu.model import CpuLlamaModel
from miniinfer.cpu.packing import choose_packing
from miniinfer.model import KVCache, LlamaModel, load_model
from model_helpers import PagedRunner, random_tokens, save, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


FAMILIES = pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 7, "head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)


@FAMILIES
def test_plain_weights_give_torchs_logits(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    # 8-bit kernels have groups of 32, plain ones take any width.
    directory = save(tiny_model(family, **options), tmp_path)
    tokens = random_tokens(50)
    expected = PagedRunner(load_model(directory), 8).run(tokens, [20, 1, 1, 13, 2])
    model = load_model(directory, packing="float32")
    assert isinstance(model, CpuLlamaModel)
    assert model.num_bytes > 0
    got = PagedRunner(model, 8).run(tokens, [20, 1, 1, 13, 2])
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


@FAMILIES
def test_bfloat16_is_nearer_to_float32_than_torchs(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    directory = save(tiny_model(family, **options), tmp_path)
    tokens = random_tokens(50)

    def logits(model: LlamaModel) -> torch.Tensor:
        return PagedRunner(model, 8).run(tokens, [20, 1, 1, 13, 2]).float()

    expected = logits(load_model(directory))
    model = load_model(directory, packing="bfloat16")
    assert isinstance(model, CpuLlamaModel)
    error = (logits(model) - expected).std() / expected.std()
    torchs = (logits(load_model(directory, torch.bfloat16)) - expected).std() / expected.std()
    assert 0 < error < min(torchs, 0.03)


@pytest.mark.parametrize(("packing", "limit"), [("int8", 0.1), ("int4", 0.6)])
def test_quantised_when_loaded(packing: str, limit: float, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    directory = save(tiny_model("llama", **sizes), tmp_path)
    tokens = random_tokens(40)
    expected = PagedRunner(load_model(directory), 8).run(tokens, [40])
    model = load_model(directory, packing=packing)
    got = PagedRunner(model, 8).run(tokens, [40])
    error = (got - expected).std() / expected.std()
    assert 0 < error < limit
    assert model.num_bytes < load_model(directory).num_bytes / 2


def test_rows_that_are_not_whole_groups_are_refused(tmp_path: Path) -> None:
    directory = save(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"rows of 48 columns .* groups of 32"):
        load_model(directory, packing="int8")


class TestBuiltin:
    def test_logits_are_near_those_of_the_dequantised_weights(self, builtin_gguf: Path) -> None:
        tokens = [1, 504, 3575, 282, 4649, 314, 7042, 30, 198, 504, 3575, 282, 8012, 314]
        expected = PagedRunner(load_model(builtin_gguf), 16).run(tokens, [len(tokens)])
        model = load_model(builtin_gguf, packing="stored")
        assert model.num_bytes < 110e6
        got = PagedRunner(model, 16).run(tokens, [5, 1, 1, 7])
        difference = (got.log_softmax(-1) - expected.log_softmax(-1)).exp().sub(1).abs()
        likely = expected.softmax(-1) > 0.01
        assert difference[likely].mean() < 0.1

    def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(self) -> None:
        prompts = [f"{word} is" for word in ("Water", "The capital of France", "A dog", "Rust")]
        llm = LLM(num_kv_blocks=256, max_model_len=512, enable_prefix_caching=False)
        assert llm.llm_engine.engine.kv_dtype is torch.float16
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        together = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in together] == alone
        assert "Paris" in together[1].text

    @pytest.mark.parametrize("tokens", [33, 34])
    @pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 16}])
    def test_a_cached_prefix_and_chunks_change_no_bit(
        self, limits: dict[str, int], tokens: int
    ) -> None:
        prompt: Any = {"prompt_token_ids": [1, *range(1000, 999 + tokens)]}
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
        whole = LLM(num_kv_blocks=64, max_model_len=512, enable_prefix_caching=False)
        (expected,) = whole.generate([prompt], params)
        llm = LLM(num_kv_blocks=64, max_model_len=512, **limits)
        for cached in (0, 32):
            (output,) = llm.generate([prompt], params)
            assert output.num_cached_tokens == cached
            assert output.token_ids == expected.token_ids
            assert output.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "int8"}, torch.float16),
        ({"quantization": "int8", "dtype": "bfloat16"}, torch.float16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, torch.float32),
    ],
)
def test_the_cache_is_no_finer_than_the_weights(
    settings: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny.write_tiny_llama(tmp_path / "tiny")
    llm = LLM(str(folder), num_kv_blocks=64, **settings)
    assert llm.llm_engine.engine.kv_dtype is expected
    (output,) = llm.generate(["abc"], GREEDY)
    assert len(output.token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
def test_every_type_of_cache(kind: str, tmp_path: Path) -> None:
    folder = tiny.write_tiny_llama(tmp_path / "tiny")
    llm = LLM(str(folder), num_kv_blocks=64, kv_cache_dtype=kind, max_num_batched_tokens=16)
    cache = llm.llm_engine.engine.runner.cache
    assert cache.keys[0].dtype is getattr(torch, kind)
    outputs = llm.generate(["abcdefghijklmnopqrstuvwxyz", "012"], GREEDY)
    assert [len(output.token_ids) for output in outputs] == [24, 24]
    if kind == "float32":
        torch_llm = LLM(str(folder), num_kv_blocks=64, attention_backend="torch")
        again = torch_llm.generate(["abcdefghijklmnopqrstuvwxyz", "012"], GREEDY)
        assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
        assert not isinstance(torch_llm.llm_engine.engine.model, CpuLlamaModel)


def test_an_8_bit_cache_counts_its_scales() -> None:
    cache = KVCache(2, 3, 4, 5, 16, torch.int8, "cpu")
    assert cache.bytes_per_block == 2 * 2 * 4 * 5 * (16 + 4)
    assert cache.scales is not None
    assert cache.scales[1][0].shape == (3, 4, 5)


class TestChoice:
    @pytest.mark.parametrize(
        ("settings", "is_gguf", "expected"),
        [
            ({}, True, "stored"),
            ({}, False, "float32"),
            ({"quantization": "none"}, True, "float32"),
            ({"dtype": "float32"}, True, "float32"),
            ({"dtype": "bfloat16"}, False, "bfloat16"),
            ({"dtype": "float16"}, False, None),
            ({"quantization": "int8"}, False, "int8"),
            ({"quantization": "int4", "dtype": "bfloat16"}, True, "int4"),
            ({"attention_backend": "torch"}, True, None),
        ],
    )
    def test_on_a_cpu(self, settings: dict[str, str], is_gguf: bool, expected: str | None) -> None:
        assert choose_packing(EngineArgs(**settings), on_cpu=True, is_gguf=is_gguf) == expected

    def test_elsewhere(self) -> None:
        assert choose_packing(EngineArgs(device="cuda"), on_cpu=False, is_gguf=True) is None

    @pytest.mark.parametrize(
        ("settings", "on_cpu", "message"),
        [
            ({"quantization": "int8"}, False, "int8 cannot be had with device auto"),
            ({"quantization": "int4", "attention_backend": "torch"}, True, "int4 .* torch"),
            ({"attention_backend": "cpu", "dtype": "float16"}, True, "kernels .* dtype float16"),
            ({"kv_cache_dtype": "int8", "attention_backend": "torch"}, True, "kernels .* torch"),
        ],
    )
    def test_contradictions(self, settings: dict[str, str], on_cpu: bool, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            choose_packing(EngineArgs(**settings), on_cpu=on_cpu, is_gguf=False)

    @pytest.mark.parametrize(
        "settings",
        [{"quantization": "int2"}, {"attention_backend": "flash"}, {"kv_cache_dtype": "fp4"}],
    )
    def test_unknown_values(self, settings: dict[str, str]) -> None:
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            EngineArgs(**settings)
