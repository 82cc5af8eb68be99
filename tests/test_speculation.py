"""Drafts change when tokens come, and no token, text or log probability."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from engines import SIZES, check_idle, greedy, make_llm
from miniinfer import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from miniinfer.cli.options import Parser, UsageError, add_engine_options, engine_args
from miniinfer.remote_llm import RemoteLLM

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
TEXT = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def volume(width, height, depth):\n    return width * height * depth\n"
)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller gets to see, but for how it came in pieces."""
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, choice.logprobs)
        for output in outputs
        for choice in output.outputs
    ]


def accepted(llm: LLM) -> int:
    stats = llm.get_metrics()
    drafts, accepted = (stats[f"spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert stats["spec_decode_num_drafts"] <= drafts
    assert accepted <= drafts
    return int(accepted)


def both_ways(folder: Path, prompts: list[Any], params: Any, **sizes: Any) -> tuple[LLM, LLM]:
    """Two engines, without and with drafts, that gave the same; and drafts were right."""
    plain, drafting = make_llm(folder, **sizes), make_llm(folder, speculative_config=NGRAM, **sizes)
    expected = seen(plain.generate(prompts, params))
    assert seen(drafting.generate(prompts, params)) == expected
    for llm in (plain, drafting):
        check_idle(llm.llm_engine.engine.core)
    assert accepted(plain) == 0 < accepted(drafting)
    return plain, drafting


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of bytes that repeat themselves."""
    generator = torch.Generator().manual_seed(3)
    pieces = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 3, 7, 11, 16)]
    return [piece * 3 for piece in pieces]


@pytest.fixture(scope="module")
def reference(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return tiny.greedy_reference(tiny_model, prompts, 64)


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "lengths"),
        [
            ({"num_speculative_tokens": 3}, (2, 4)),
            ({"num_speculative_tokens": 3, "prompt_lookup_max": 1}, (1, 1)),
            ({"num_speculative_tokens": 3, "prompt_lookup_min": 6}, (6, 6)),
            ('{"num_speculative_tokens": 3, "prompt_lookup_max": null}', (2, 4)),
            ('{"num_speculative_tokens": 3, "method": "ngram"}', (2, 4)),
        ],
    )
    def test_what_is_left_out_has_defaults(
        self, given: dict[str, object] | str, lengths: tuple[int, int]
    ) -> None:
        args = EngineArgs(speculative_config=given)
        assert args.speculative_config == {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": lengths[0],
            "prompt_lookup_max": lengths[1],
        }
        # As it goes to another process and is read there.
        assert EngineArgs(**args.as_dict()) == args  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([4], "speculative_config must be a mapping, got [4]"),
            ("4", "speculative_config must be a mapping, got 4"),
            ("{", "speculative_config must be a JSON object: "),
            ({}, "speculative_config must have num_speculative_tokens"),
            ({"num_speculative_tokens": None}, "must have num_speculative_tokens"),
            (
                {"num_speculative_tokens": 0},
                "num_speculative_tokens of speculative_config must be ",
            ),
            ({"num_speculative_tokens": 65}, "must be an integer from 1 to 64, got 65"),
            ({"num_speculative_tokens": True}, "must be an integer from 1 to 64, got True"),
            pytest.param(
                "[" * 100_000, "speculative_config must be a JSON object: ", id="nested too deep"
            ),
            (
                {"num_speculative_tokens": 4, "foo": "x"},
                "speculative_config has no key 'foo'; it takes num_speculative_tokens, "
                "prompt_lookup_min, prompt_lookup_max, method",
            ),
            ({4: 4}, "speculative_config has no key 4; it takes "),
            (
                NGRAM | {"method": "eagle"},
                "method of speculative_config must be 'ngram', got 'eagle'",
            ),
            (
                {"model": "x", "method": "eagle"},
                "method of speculative_config must be 'ngram', got 'eagle'",
            ),
            ({"method": ["ngram"]}, "method of speculative_config must be 'ngram', got ['ngram']"),
            (
                NGRAM | {"prompt_lookup_max": 17},
                "prompt_lookup_max of speculative_config must be an",
            ),
            (
                NGRAM | {"prompt_lookup_min": "2"},
                "prompt_lookup_min of speculative_config must be an",
            ),
            (
                NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
                "speculative_config must be at most prompt_lookup_max, 3, got 5",
            ),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, given: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            EngineArgs(speculative_config=given)

    def test_the_flag_takes_json(self) -> None:
        parser = Parser()
        add_engine_options(parser)
        flag = "--speculative-config"
        given = parser.parse_args([flag, '{"num_speculative_tokens": 2}'])
        assert engine_args(given).speculation() is not None
        assert engine_args(parser.parse_args([])).speculation() is None
        with pytest.raises(UsageError, match="got 99"):
            engine_args(parser.parse_args([flag, '{"num_speculative_tokens": 99}']))


@pytest.mark.parametrize("draft_tokens", [1, 4, 64])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"block_size": 1, "num_kv_blocks": 1024},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 6, "max_num_seqs": 5},
        {"num_kv_blocks": 40},
        {"enable_prefix_caching": False, "quantization": "none", "attention_backend": "torch"},
    ],
    ids=lambda sizes: ",".join(sizes) or "default",
)
def test_greedy_tokens_are_those_of_transformers(
    tiny_model: Path,
    prompts: list[list[int]],
    reference: list[list[int]],
    sizes: dict[str, Any],
    draft_tokens: int,
) -> None:
    config = NGRAM | {"num_speculative_tokens": draft_tokens}
    llm = make_llm(tiny_model, speculative_config=config, **sizes)
    outputs = llm.generate(prompts, greedy(64))
    assert [output.token_ids for output in outputs] == reference
    check_idle(llm.llm_engine.engine.core)
    assert accepted(llm) > 0
    assert (llm.get_metrics()["num_preemptions"] > 0) == (sizes == {"num_kv_blocks": 40})


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.4])
def test_sampled_tokens_and_logprobs_are_the_same_to_the_last_bit(
    tiny_model: Path, prompts: list[list[int]], temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=0.9, seed=5, max_tokens=60, n=2, logprobs=2
    )
    both_ways(tiny_model, prompts, params)


def test_lengths_and_stops_within_drafts(tiny_model: Path, prompts: list[list[int]]) -> None:
    [output] = make_llm(tiny_model).generate([prompts[0]], greedy(40))
    ids, text = output.token_ids, output.text
    # Of each run of the same requests only the end differs, one token later each time.
    params: list[SamplingParams] = []
    for at in range(20, 32):
        params += [
            greedy(at),
            greedy(40, stop_token_ids=[ids[at]], min_tokens=0),
            greedy(40, stop=[text[at // 2 : at // 2 + 3] or "-"]),
        ]
    both_ways(tiny_model, [prompts[0]] * len(params), params)


def test_requests_without_drafts_run_beside_those_with(
    tiny_model: Path, prompts: list[list[int]]
) -> None:
    params = [
        greedy(40),
        greedy(40, frequency_penalty=1.0),
        greedy(40, min_tokens=30, ignore_eos=False),
        greedy(40, allowed_token_ids=list(range(65, 91))),
        greedy(40, prompt_logprobs=1, logprobs=0),
    ]
    both_ways(tiny_model, prompts, params)


def test_another_process_drafts_too(tiny_model: Path, prompts: list[list[int]]) -> None:
    prompt: Any = {"prompt_token_ids": prompts[0]}

    async def run(kind: Any, config: Any) -> tuple[list[int], dict[str, Any]]:
        args = EngineArgs(model=str(tiny_model), speculative_config=config, **SIZES)
        async with await asyncio.to_thread(kind.from_args, args) as llm:
            async for output in llm.generate(prompt, greedy(60)):
                ids = output.token_ids
            return ids, llm.stats()

    expected, plain = asyncio.run(run(AsyncLLM, None))
    assert plain["spec_decode_num_drafts"] == 0
    for kind in (AsyncLLM, RemoteLLM):
        ids, stats = asyncio.run(run(kind, NGRAM))
        assert ids == expected
        assert stats["spec_decode_num_accepted_tokens"] > 0


def test_a_quotation_of_the_builtin_model(builtin_gguf: Path) -> None:
    """Quantised: each row of a step is computed by the same sums as alone."""
    sizes: Any = {"num_kv_blocks": 256, "max_num_seqs": 8}
    prompt = f"{TEXT}\nThe same file once more:\n\n{TEXT[:60]}"
    params = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=1),
        SamplingParams(temperature=0.5, seed=9, max_tokens=40, logprobs=1),
    ]
    both_ways(builtin_gguf, [prompt] * 2, params, **sizes | {"max_model_len": 512})
