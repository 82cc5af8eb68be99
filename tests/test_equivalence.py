"""Greedy tokens in float32 are transformers' tokens, however the work is cut up."""

from pathlib import Path

import pytest
import torch

import tiny
from miniinfer import LLM, RequestOutput, SamplingParams

# Thousands of forward passes of the real model, the reference's too: minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)

MAX_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "The three primary colors are",
    "To be, or not to be,",
    "List the days of the week: Monday, Tuesday,",
    "In 1969, the first human to walk on the Moon was",
    "Photosynthesis is the process by which plants",
    "The quick brown fox",
    "A haiku about autumn:\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 12 times 12?\nA:",
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "import numpy as np\n\ndef softmax(x):\n",
    '{"name": "Ada", "born": 1815, "known_for": "',
    "<html>\n<head>\n<title>",
    "中国的首都是",
    "今天天气很好，我们去",
    "人工智能是一门",
    "I love pizza 🍕 and",
    "😀😃😄 Emojis are",
    # Longer than any budget of the chunked runs.
    "The history of computing is a long one. " * 12 + "It began when",
]


@pytest.fixture(scope="module")
def reference(builtin_gguf: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt ids and transformers' greedy continuations of them."""
    from gguf_reference import transformers_from_gguf
    from miniinfer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(builtin_gguf)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    model = transformers_from_gguf(builtin_gguf)
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        eos_token_id=None,
        pad_token_id=2,
    )
    return prompts, out[:, width:].tolist()


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def check(llm: LLM, outputs: list[RequestOutput], expected: list[list[int]]) -> None:
    for output, tokens, prompt in zip(outputs, expected, PROMPTS, strict=True):
        assert output.token_ids == tokens, prompt
        assert output.text == llm.get_tokenizer().decode(tokens), prompt
        assert output.outputs[0].finish_reason == "length"
    llm.llm_engine.engine.core.check()
    stats = llm.get_metrics()
    assert stats["kv_blocks_used"] == 0
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0


class TestBuiltinModel:
    def test_one_at_a_time(self, reference: tuple[list[list[int]], list[list[int]]]) -> None:
        prompts, expected = reference
        llm = LLM(quantization="none", enable_prefix_caching=False, num_kv_blocks=1024)
        outputs = [llm.generate([prompt], greedy())[0] for prompt in prompts]
        check(llm, outputs, expected)

    def test_all_at_once_and_again_with_a_warm_prefix_cache(
        self, reference: tuple[list[list[int]], list[list[int]]]
    ) -> None:
        prompts, expected = reference
        llm = LLM(quantization="none", num_kv_blocks=1024)
        check(llm, llm.generate(prompts, greedy()), expected)
        warm = llm.generate(prompts, greedy())
        check(llm, warm, expected)
        for prompt, output in zip(prompts, warm, strict=True):
            assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert llm.get_metrics()["prefix_cache_hits"] > 0

    def test_in_chunks_of_32_tokens(
        self, reference: tuple[list[list[int]], list[list[int]]]
    ) -> None:
        prompts, expected = reference
        llm = LLM(quantization="none", max_num_batched_tokens=32, num_kv_blocks=1024)
        check(llm, llm.generate(prompts, greedy()), expected)

    def test_with_preemption(self, reference: tuple[list[list[int]], list[list[int]]]) -> None:
        prompts, expected = reference
        longest = max(map(len, prompts)) + MAX_TOKENS
        # A quarter of what all of them would fill.
        llm = LLM(quantization="none", num_kv_blocks=40, max_model_len=-(-longest // 16) * 16)
        check(llm, llm.generate(prompts, greedy()), expected)
        assert llm.get_metrics()["num_preemptions"] > 0


@pytest.fixture(scope="module")
def tiny_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    folder = tiny.write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 256, (21,), generator=generator).tolist()
    prompts = []
    for length in (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 50):
        own = torch.randint(0, 256, (length,), generator=generator).tolist()
        # Some share a prefix that no block size divides.
        prompts.append((shared if length % 2 else []) + own)
    return folder, prompts, tiny.greedy_reference(folder, prompts, 24)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("budget", "seqs", "tokens_in_cache"),
    [(2048, 256, 4096), (7, 5, 4096), (40, 3, 4096), (64, 12, 200), (16, 12, 130)],
)
def test_any_block_size_budget_and_cache(
    tiny_reference: tuple[Path, list[list[int]], list[list[int]]],
    block_size: int,
    caching: bool,
    budget: int,
    seqs: int,
    tokens_in_cache: int,
) -> None:
    folder, prompts, expected = tiny_reference
    blocks = -(-tokens_in_cache // block_size)
    llm = LLM(
        str(folder),
        block_size=block_size,
        num_kv_blocks=blocks,
        max_model_len=min(128, blocks * block_size),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(24))
        assert [output.token_ids for output in outputs] == expected
        llm.llm_engine.engine.core.check()
