"""Offline generation: what `LLM` promises, on a real engine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from engines import check_idle, greedy, make_llm
from miniinfer import LLM, EngineArgs, EngineDeadError, ParameterError, RequestError, SamplingParams


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine that other tests have used, and that each must leave as it was."""
    yield shared
    check_idle(shared.llm_engine.engine.core)


@pytest.fixture
def own(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """Make engines of one's own; they must be idle at the end."""
    made = []

    def make(folder: Path = tiny_model, **sizes: Any) -> LLM:
        made.append(make_llm(folder, **sizes))
        return made[-1]

    yield make
    for llm in made:
        check_idle(llm.llm_engine.engine.core)


def patch_logits(llm: LLM, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Have `change` make new logits of the model's; it is told how often it was called before."""
    model, calls = llm.llm_engine.engine.runner.model, iter(range(1_000_000))
    original = model.logits
    model.logits = lambda *given: change(original(*given), next(calls))


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


class TestPrompts:
    def test_outputs_are_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        prompts = ["first", "b", "the third is the longest of them", "4th"]
        outputs = llm.generate(prompts, greedy())
        assert [output.prompt for output in outputs] == prompts
        assert ids_of(outputs) == [llm.generate(p, greedy())[0].token_ids for p in prompts]

    def test_text_ids_and_mappings_are_the_same_prompt(self, llm: LLM) -> None:
        ids = llm.get_tokenizer().encode("same")
        prompts = [
            "same",
            ids,
            tuple(ids),
            {"prompt": "same"},
            {"prompt": ids},
            {"prompt_token_ids": ids},
        ]
        outputs = llm.generate(prompts, greedy())
        assert len({tuple(output.token_ids) for output in outputs}) == 1
        assert all(output.prompt_token_ids == ids for output in outputs)
        assert [output.prompt for output in outputs] == ["same", None, None, "same", None, None]
        single = llm.generate(ids, greedy())
        assert len(single) == 1
        assert single[0].token_ids == outputs[0].token_ids

    def test_token_ids_may_be_of_numpy(self, llm: LLM) -> None:
        import numpy as np

        ids = [np.int64(5), np.int32(6)]
        assert llm.generate([ids], greedy())[0].prompt_token_ids == [5, 6]
        assert llm.generate(ids, greedy())[0].prompt_token_ids == [5, 6]

    def test_nothing_is_nothing(self, llm: LLM) -> None:
        assert llm.generate([]) == []
        assert llm.generate([], [], priority=[]) == []
        assert llm.chat([]) == []

    @pytest.mark.parametrize(
        ("bad", "word"),
        [
            ("", "empty"),
            ([], "empty"),
            ([1, -1], "-1"),
            ([260], "260"),
            ([2**40], str(2**40)),
            ([1.5], "1.5"),
            ([True], "True"),
            ([1, "a"], "'a'"),
            (b"bytes", "bytes"),
            (7.5, "float"),
            (None, "NoneType"),
            ({}, "neither"),
            ({"prompt": 5}, "int"),
            ({"prompt_token_ids": "text"}, "'t'"),
            ("x" * 128, "128"),
            ("x" * 125, "133"),
        ],
    )
    def test_an_invalid_prompt_is_named_and_nothing_is_left(
        self, llm: LLM, bad: Any, word: str
    ) -> None:
        before = llm.get_metrics()["num_steps"]
        with pytest.raises(ValueError, match=word) as caught:
            llm.generate(["good", "fine", bad, "late"], greedy())
        assert caught.value.__notes__ == ["in prompt 2"]
        check_idle(llm.llm_engine.engine.core)
        assert llm.get_metrics()["num_steps"] == before
        assert not llm.llm_engine.has_unfinished_requests()
        assert len(llm.generate(["good", "fine"], greedy())) == 2

    @pytest.mark.parametrize("bad", [None, 5, object()])
    def test_what_is_no_prompt_at_all(self, llm: LLM, bad: Any) -> None:
        with pytest.raises(ParameterError, match=type(bad).__name__):
            llm.generate(bad, greedy())

    def test_a_refusal_reads_well_and_names_its_parameter(self, llm: LLM) -> None:
        with pytest.raises(RequestError) as caught:
            llm.generate("x" * 127, greedy(2))
        assert str(caught.value) == (
            "the prompt has 127 tokens and max_tokens is 2: together 129, "
            "beyond the context of 128 tokens"
        )
        assert caught.value.param == "max_tokens"
        with pytest.raises(RequestError, match="vocabulary size of 260, got 999") as caught:
            llm.generate([[999]], greedy())
        assert caught.value.param == "prompt"


class TestParameters:
    def test_one_for_each_prompt(self, llm: LLM) -> None:
        outputs = llm.generate(["a", "b", "c"], [greedy(1), greedy(2), greedy(3)])
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3]

    @pytest.mark.parametrize("count", [0, 2, 4])
    def test_a_wrong_number(self, llm: LLM, count: int) -> None:
        with pytest.raises(ParameterError, match=f"3 prompts need .* got {count}"):
            llm.generate(["a", "b", "c"], [greedy()] * count)
        with pytest.raises(ParameterError, match=f"3 prompts need .* got {count}"):
            llm.generate(["a", "b", "c"], greedy(), priority=[0] * count)

    @pytest.mark.parametrize("bad", [5, "text", [None], [{"max_tokens": 3}]])
    def test_of_a_wrong_type(self, llm: LLM, bad: Any) -> None:
        with pytest.raises(ParameterError, match="sampling_params"):
            llm.generate(["a"], bad)

    def test_the_callers_own_are_left_alone(self, llm: LLM) -> None:
        params = greedy()
        before = params.output_kind
        llm.generate("a", params)
        list(llm.stream("a", params))
        assert params.output_kind is before

    def test_without_any_the_models_recommendation_applies(
        self, tmp_path: Path, own: Callable[..., LLM]
    ) -> None:
        folder = tiny.write_tiny_llama(tmp_path / "model")
        advice = '{"max_new_tokens": 3, "do_sample": false, "eos_token_id": 256}'
        (folder / "generation_config.json").write_text(advice)
        llm = own(folder)
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0)
        assert len(llm.generate("a")[0].token_ids) <= 3

    def test_n_choices_come_in_order_and_differ(self, llm: LLM) -> None:
        params = SamplingParams(n=5, seed=7, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(["one", "two"], params)
        for output in outputs:
            assert [choice.index for choice in output.outputs] == [0, 1, 2, 3, 4]
            assert len({tuple(choice.token_ids) for choice in output.outputs}) == 5
        again = llm.generate(["one", "two"], params)
        assert [o.outputs for o in again] == [o.outputs for o in outputs]

    def test_n_beyond_max_num_seqs(self, own: Callable[..., LLM]) -> None:
        llm = own(max_num_seqs=4)
        outputs = llm.generate("a", greedy(n=5))
        assert [choice.index for choice in outputs[0].outputs] == [0, 1, 2, 3, 4]
        assert len({tuple(choice.token_ids) for choice in outputs[0].outputs}) == 1
        many = llm.generate(["a", "b", "c"], greedy(n=3))
        assert [len(output.outputs) for output in many] == [3, 3, 3]

    def test_more_choices_than_can_be(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="n must be from 1 to 16384, got 2147483647"):
            llm.generate("a", greedy(n=2**31 - 1))

    def test_the_engines_seed_makes_a_run_repeatable(self, own: Callable[..., LLM]) -> None:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        first, second = (ids_of(own(seed=3).generate(["a", "a"], params)) for _ in range(2))
        assert first == second
        assert first[0] != first[1]
        assert ids_of(own(seed=4).generate(["a", "a"], params)) != first

    @pytest.mark.parametrize("max_num_batched_tokens", [16, 256])
    def test_a_seed_gives_the_same_tokens_in_any_company(
        self, own: Callable[..., LLM], max_num_batched_tokens: int
    ) -> None:
        prompt = "a prompt that is longer than one chunk"
        seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=20, ignore_eos=True)
        unseeded = SamplingParams(max_tokens=9, ignore_eos=True)
        other = SamplingParams(seed=1, top_p=0.9, top_k=20, max_tokens=25, ignore_eos=True)
        expected = own().generate(prompt, seeded)[0].token_ids
        llm = own(max_num_batched_tokens=max_num_batched_tokens)
        for company in ([], [unseeded], [other], [unseeded, other, unseeded]):
            behind = llm.generate([prompt, *"xyz"[: len(company)]], [seeded, *company])
            assert behind[0].token_ids == expected
            ahead = llm.generate([*"xyz"[: len(company)], prompt], [*company, seeded])
            assert ahead[-1].token_ids == expected

    def test_a_seed_survives_preemption(self, own: Callable[..., LLM]) -> None:
        params = [
            SamplingParams(seed=seed, temperature=0.8, max_tokens=20, ignore_eos=True)
            for seed in range(4)
        ]
        prompts = ["alpha", "beta", "gamma", "delta"]
        expected = ids_of(own().generate(prompts, params))
        tight = own(num_kv_blocks=9, max_model_len=36)
        assert ids_of(tight.generate(prompts, params)) == expected
        assert tight.get_metrics()["num_preemptions"] > 0

    def test_logit_bias_forces_and_bans(self, llm: LLM) -> None:
        assert llm.generate("a", greedy(3, logit_bias={"5": 100}))[0].token_ids == [5, 5, 5]
        assert llm.generate("a", greedy(3, logit_bias={5: 500}))[0].token_ids == [5, 5, 5]
        likely = llm.generate("a", greedy(1))[0].token_ids[0]
        assert likely not in llm.generate("a", greedy(8, logit_bias={likely: -100}))[0].token_ids

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(logit_bias={999999: 5}),
            SamplingParams(logit_bias={260: 1}),
            SamplingParams(stop_token_ids=[260]),
        ],
    )
    def test_token_ids_beyond_the_vocabulary(self, llm: LLM, params: SamplingParams) -> None:
        with pytest.raises(RequestError, match="below the vocabulary size of 260"):
            llm.generate("a", params)

    def test_min_tokens_holds_off_every_ending_token(
        self, own: Callable[..., LLM], tmp_path: Path
    ) -> None:
        folder = tiny.write_tiny_llama(tmp_path / "model", eos_token_id=[tiny.EOS, 65])
        llm = own(folder)
        for ending in (tiny.EOS, 65):
            params = SamplingParams(
                temperature=0, min_tokens=4, max_tokens=20, logit_bias={ending: 100}
            )
            output = llm.generate("a", params)[0]
            assert len(output.token_ids) == 5
            assert output.token_ids[4] == ending
            assert not {tiny.EOS, 65} & set(output.token_ids[:4])
            assert output.outputs[0].finish_reason == "stop"

    def test_parameters_of_one_do_not_touch_another(self, own: Callable[..., LLM]) -> None:
        """Penalties on some rows of a batch only, whoever comes first or leaves first."""
        llm = own()
        edited = greedy(16, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
        expected = llm.generate("Paris Paris", edited)[0].token_ids
        plain = llm.generate("other", greedy(16))[0].token_ids
        assert expected != llm.generate("Paris Paris", greedy(16))[0].token_ids
        for length in (4, 16):
            for prompts, params in (
                (["Paris Paris", "other"], [edited, greedy(length)]),
                (["other", "Paris Paris"], [greedy(length), edited]),
            ):
                outputs = {o.prompt: o.token_ids for o in llm.generate(prompts, params)}
                assert outputs["Paris Paris"] == expected
                assert outputs["other"] == plain[:length]


def penalised(logits: list[float], prompt: set[int], params: SamplingParams) -> list[int]:
    """What greedy decoding of constant logits gives, by the penalties' definition."""
    counts = [0] * len(logits)
    tokens = []
    for _ in range(params.max_tokens or 0):
        values = []
        for token, logit in enumerate(logits):
            value = logit
            if counts[token] or token in prompt:
                penalty = params.repetition_penalty
                value = value / penalty if value > 0 else value * penalty
            value -= params.frequency_penalty * counts[token]
            value -= params.presence_penalty * (counts[token] > 0)
            values.append(value)
        best = max(range(len(values)), key=lambda token: (values[token], -token))
        counts[best] += 1
        tokens.append(best)
    return tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.3},
        {"frequency_penalty": 0.37},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.9, "presence_penalty": -0.4, "frequency_penalty": 0.21},
    ],
)
@pytest.mark.parametrize("blocks", [256, 9])
def test_penalties_over_constant_logits(
    own: Callable[..., LLM], fields: dict[str, float], blocks: int
) -> None:
    """Repetition sees prompt and output, the others the output; preemption forgets none."""
    logits = [-3.0 - 0.001 * token for token in range(tiny.VOCAB)]
    for token, value in ((7, 9.1), (8, 8.3), (9, 7.6), (10, 6.2)):
        logits[token] = value
    llm = own(num_kv_blocks=blocks, max_model_len=36)
    patch_logits(llm, lambda given, _: torch.tensor(logits).expand(given.shape).clone())
    params = greedy(20, **fields)
    prompts = [[7, 7, 1], [8, 2, 2, 2], [3, 9, 10], [4]]
    outputs = llm.generate(prompts, params)
    assert ids_of(outputs) == [penalised(logits, set(prompt), params) for prompt in prompts]
    assert (llm.get_metrics()["num_preemptions"] > 0) == (blocks == 9)


class TestEnds:
    def test_stop_string_is_cut_and_reported(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        tokens = [ord(letter) - 33 for letter in "abcXYdef"]
        forced = iter(())

        def force(logits: torch.Tensor, _: int) -> torch.Tensor:
            logits = torch.full_like(logits, -1.0)
            logits[:, next(forced)] = 1.0
            return logits

        model = llm.llm_engine.engine.runner.model
        patch_logits(llm, force)
        try:
            assert llm.get_tokenizer().decode(tokens) == "abcXYdef"
            for include, text in ((False, "abc"), (True, "abcXY")):
                forced = iter(tokens)
                params = SamplingParams(
                    temperature=0, max_tokens=8, stop=["XY"], include_stop_str_in_output=include
                )
                [output] = llm.generate("p", params)
                choice = output.outputs[0]
                assert (choice.text, choice.finish_reason) == (text, "stop")
                assert (choice.stop_reason, output.stop_reason) == ("XY", "stop")
                assert choice.token_ids == tokens[:5]
            # Complete before min_tokens, the stop string counts for nothing.
            forced = iter(tokens)
            params = SamplingParams(temperature=0, max_tokens=8, min_tokens=6, stop=["XY"])
            [output] = llm.generate("p", params)
            assert (output.text, output.stop_reason) == ("abcXYdef", "max_tokens")
            forced = iter(tokens)
            params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens[2]])
            [output] = llm.generate("p", params)
            assert (output.text, output.outputs[0].stop_reason) == ("ab", tokens[2])
            assert output.token_ids == tokens[:3]
        finally:
            del model.logits

    def test_every_eos_of_the_model_ends_and_ignore_eos_covers_all(
        self, own: Callable[..., LLM], tmp_path: Path
    ) -> None:
        folder = tiny.write_tiny_llama(tmp_path / "model")
        (folder / "generation_config.json").write_text('{"eos_token_id": [256, 70]}')
        llm = own(folder)
        for ending in (256, 70):
            ended = SamplingParams(temperature=0, max_tokens=6, logit_bias={ending: 100})
            [output] = llm.generate("a", ended)
            assert (output.text, output.stop_reason) == ("", "eos")
            assert output.token_ids == [ending]
            [output] = llm.generate("a", greedy(6, logit_bias={ending: 100}))
            assert output.token_ids == [ending] * 6
            assert output.stop_reason == "max_tokens"

    def test_without_max_tokens_the_context_ends_it(self, own: Callable[..., LLM]) -> None:
        llm = own(max_model_len=32)
        [output] = llm.generate("abc", greedy(max_tokens=None))
        assert len(output.token_ids) == 29
        assert output.stop_reason == "max_tokens"
        [output] = llm.generate("x" * 31, greedy(1))
        assert len(output.token_ids) == 1


class TestLogprobs:
    def test_they_match_the_tokens(self, llm: LLM) -> None:
        [output] = llm.generate("abc", greedy(6, logprobs=3))
        choice = output.outputs[0]
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == 6
        for token, row in zip(choice.token_ids, choice.logprobs, strict=True):
            assert len(row) == 3
            best = max(row, key=lambda each: row[each].logprob)
            assert best == token
            assert row[token].rank == 1
            assert sorted(each.rank for each in row.values()) == [1, 2, 3]
            assert all(each.logprob <= 0 for each in row.values())

    def test_the_chosen_one_is_there_however_unlikely(self, llm: LLM) -> None:
        params = SamplingParams(temperature=5.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=1)
        [output] = llm.generate("abc", params)
        rows = output.outputs[0].logprobs or []
        assert [token in row for token, row in zip(output.token_ids, rows, strict=True)] == [
            True
        ] * 20
        assert any(len(row) == 2 for row in rows)
        zero = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
        [output] = llm.generate("abc", zero)
        assert [list(row) for row in output.outputs[0].logprobs or []] == [
            [token] for token in output.token_ids
        ]

    def test_none_unless_asked_even_beside_others(self, llm: LLM) -> None:
        outputs = llm.generate(["a", "b"], [greedy(), greedy(logprobs=2)])
        assert outputs[0].outputs[0].logprobs is None
        assert len(outputs[1].outputs[0].logprobs or []) == 8


def reference_prompt_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log probabilities of every token after each of `ids` but the last, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


class TestPromptLogprobs:
    PROMPT = "a prompt of forty characters, or so it is"

    @pytest.mark.parametrize("budget", [256, 16, 4])
    @pytest.mark.parametrize("blocks", [256, 20])
    def test_they_are_the_references_in_chunks_and_after_preemption(
        self, own: Callable[..., LLM], tiny_model: Path, budget: int, blocks: int
    ) -> None:
        llm = own(
            max_num_batched_tokens=budget,
            num_kv_blocks=blocks,
            max_num_seqs=4,
            max_model_len=60,
        )
        # Beside it, requests that want the same blocks.
        params = [greedy(8, prompt_logprobs=2), *[greedy(30)] * 3]
        output, *_ = llm.generate([self.PROMPT, "x" * 20, "y" * 20, "z" * 20], params)
        preemptions = llm.llm_engine.engine.core.stats()["num_preemptions"]
        assert bool(preemptions) == (blocks == 20)
        ids = output.prompt_token_ids
        expected = reference_prompt_logprobs(tiny_model, ids)
        first, *rest = output.prompt_logprobs or []
        assert first is None
        for row, token, known in zip(rest, ids[1:], expected, strict=True):
            assert row is not None
            assert row[token].logprob == pytest.approx(known[token].item(), abs=1e-4)
            assert row[token].rank == int((known > known[token]).sum()) + 1
            best = known.topk(2).indices.tolist()
            assert set(row) == {token, *best}

    def test_a_cached_prompt_reports_the_same(self, own: Callable[..., LLM]) -> None:
        llm = own()
        [first] = llm.generate(self.PROMPT, greedy(2, prompt_logprobs=1))
        [again] = llm.generate(self.PROMPT, greedy(2, prompt_logprobs=1))
        assert again.num_cached_tokens == 0
        assert again.prompt_logprobs == first.prompt_logprobs
        [cached] = llm.generate(self.PROMPT, greedy(2))
        assert cached.num_cached_tokens > 0
        assert cached.prompt_logprobs is None

    def test_once_in_a_stream_and_with_several_choices(self, llm: LLM) -> None:
        params = greedy(4, prompt_logprobs=0, n=2, temperature=1.0)
        outputs = list(llm.stream("abc", params))
        [told] = [output for output in outputs if output.prompt_logprobs is not None]
        ids = told.prompt_token_ids
        assert [row and list(row) for row in told.prompt_logprobs or []] == [
            None,
            *([token] for token in ids[1:]),
        ]

    def test_one_token(self, llm: LLM) -> None:
        [output] = llm.generate([[5]], greedy(1, prompt_logprobs=3))
        assert output.prompt_logprobs == [None]


class TestStream:
    def test_deltas_are_the_whole(self, llm: LLM) -> None:
        for prompt in ("abc", "x", "日本 😀"):
            [whole] = llm.generate(prompt, greedy(40, logprobs=1))
            deltas = list(llm.stream(prompt, greedy(40, logprobs=1)))
            assert "".join(delta.text for delta in deltas) == whole.text
            assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
            logprobs = [row for delta in deltas for row in delta.outputs[0].logprobs or []]
            # Numbers may differ in the last bit: the prefix cache spares the second run a chunk.
            for row, expected in zip(logprobs, whole.outputs[0].logprobs or [], strict=True):
                assert list(row) == list(expected)
                for token in row:
                    assert row[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
            assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert len(deltas) > 10

    def test_closing_cancels_and_frees(self, llm: LLM) -> None:
        aborted = llm.get_metrics()["finished_abort"]
        stream = llm.stream("abc", greedy(100))
        next(stream)
        assert llm.get_metrics()["num_requests_running"] == 1
        stream.close()
        check_idle(llm.llm_engine.engine.core)
        assert llm.get_metrics()["finished_abort"] == aborted + 1
        assert list(stream) == []
        stream.close()

    def test_one_that_nobody_reads_is_no_leak(self, llm: LLM) -> None:
        llm.stream("abc", greedy(100))
        closed = llm.stream("abc", greedy(100))
        closed.close()
        assert len(llm.generate(["a", "b"], greedy())) == 2

    def test_open_beside_generate_and_another(self, llm: LLM) -> None:
        expected = {prompt: llm.generate(prompt, greedy(20))[0].text for prompt in "abc"}
        unread, half = llm.stream("a", greedy(20)), llm.stream("b", greedy(20))
        text = next(half).text
        assert llm.generate("c", greedy(20))[0].text == expected["c"]
        assert "".join(delta.text for delta in unread) == expected["a"]
        assert text + "".join(delta.text for delta in half) == expected["b"]

    def test_requests_added_by_hand_do_not_disturb_generate(self, llm: LLM) -> None:
        llm.llm_engine.add_request("by-hand", "a", greedy(3))
        assert [o.prompt for o in llm.generate(["b", "c"], greedy(12))] == ["b", "c"]

    def test_closing_the_llm_ends_them(self, own: Callable[..., LLM]) -> None:
        with own() as llm:
            stream = llm.stream("a", greedy(100))
            next(stream)
        assert list(stream) == []
        with pytest.raises(EngineDeadError, match="the engine has stopped: it was closed"):
            llm.generate("a", greedy(2))


class TestChat:
    MESSAGES = ({"role": "user", "content": "hi"},)

    def test_one_conversation_and_several(self, llm: LLM) -> None:
        tokenizer = llm.get_tokenizer()
        expected = tokenizer.encode("<user>hi<assistant>")
        one = llm.chat(list(self.MESSAGES), greedy())
        assert [output.prompt_token_ids for output in one] == [expected]
        longer = [*self.MESSAGES, {"role": "assistant", "content": "yes?"}]
        two = llm.chat([list(self.MESSAGES), longer], [greedy(2), greedy(3)])
        assert [len(output.token_ids) for output in two] == [2, 3]
        assert two[0].token_ids == one[0].token_ids[:2]

    def test_the_templates_own_arguments(self, llm: LLM) -> None:
        template = "{% if enable_thinking %}think{% else %}answer{% endif %}"
        for value, text in ((True, "think"), (False, "answer")):
            [output] = llm.chat(
                list(self.MESSAGES),
                greedy(),
                chat_template=template,
                chat_template_kwargs={"enable_thinking": value},
            )
            assert output.prompt_token_ids == llm.get_tokenizer().encode(text)

    @pytest.mark.parametrize("bad", [[[]], [["text"]], "text", ["text"], [[5]]])
    def test_what_is_no_conversation(self, llm: LLM, bad: Any) -> None:
        with pytest.raises(ValueError, match="message"):
            llm.chat(bad, greedy())


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], greedy(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], greedy(), use_tqdm=False)
    llm.generate(["a", "b"], greedy())
    assert capsys.readouterr().err == ""


def test_priority_decides_who_waits(own: Callable[..., LLM]) -> None:
    llm = own(max_num_seqs=1)
    order = []
    original = llm.llm_engine.step

    def step() -> list[Any]:
        outputs = original()
        order.extend(output.prompt for output in outputs)
        return outputs

    llm.llm_engine.step = step
    outputs = llm.generate(["late", "soon", "first"], greedy(), priority=[5, 0, -5])
    assert [output.prompt for output in outputs] == ["late", "soon", "first"]
    assert order == ["first", "soon", "late"]


class TestPrefixCache:
    def test_cached_tokens_are_whole_blocks_and_leave_one_to_compute(
        self, own: Callable[..., LLM]
    ) -> None:
        llm = own(block_size=16)
        prompt = list(range(32))
        cold, warm = (llm.generate([prompt], greedy())[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
        assert warm.token_ids == cold.token_ids
        assert llm.generate([[*prompt, 40]], greedy())[0].num_cached_tokens == 32
        assert llm.reset_prefix_cache()
        assert llm.generate([prompt], greedy())[0].num_cached_tokens == 0

    def test_off(self, own: Callable[..., LLM]) -> None:
        llm = own(enable_prefix_caching=False)
        for _ in range(2):
            assert llm.generate("a" * 40, greedy())[0].num_cached_tokens == 0


class TestSettings:
    def test_a_context_beyond_the_cache(self, own: Callable[..., LLM]) -> None:
        with pytest.raises(ValueError, match=r"129 tokens but the KV cache holds 128 \(8 blocks"):
            own(block_size=16, num_kv_blocks=8, max_model_len=129)
        llm = own(block_size=16, num_kv_blocks=8, max_model_len=128)
        [output] = llm.generate("x" * 100, greedy(28))
        assert len(output.token_ids) == 28

    def test_without_max_model_len_it_is_what_the_cache_holds(
        self, own: Callable[..., LLM], caplog: pytest.LogCaptureFixture
    ) -> None:
        llm = own(block_size=16, num_kv_blocks=8, max_model_len=None)
        assert llm.llm_engine.engine.max_model_len == 128
        assert "lowered" in caplog.text

    @pytest.mark.parametrize(
        ("settings", "on_cpu", "elsewhere"),
        [
            ({}, 512, 2048),
            ({"max_num_seqs": 3000}, 3000, 3000),
            ({"max_num_seqs": 3000, "max_num_batched_tokens": 1000}, 1000, 1000),
        ],
    )
    def test_a_step_takes_less_of_a_prompt_on_a_cpu(
        self, own: Callable[..., LLM], settings: dict[str, Any], on_cpu: int, elsewhere: int
    ) -> None:
        args = EngineArgs(**settings)
        assert args.batched_tokens(on_cpu=True) == on_cpu
        assert args.batched_tokens(on_cpu=False) == elsewhere
        assert args.max_num_seqs == min(settings.get("max_num_seqs", 256), elsewhere)
        limits = own(**{"max_num_batched_tokens": None} | settings).llm_engine.engine.limits
        assert limits["max_num_batched_tokens"] == on_cpu

    @pytest.mark.parametrize(
        ("target", "on_cpu", "elsewhere"), [("auto", 250, None), (None, None, None), (5, 5, 5)]
    )
    def test_steps_have_a_target_on_a_cpu(
        self, own: Callable[..., LLM], target: float | str | None, on_cpu: Any, elsewhere: Any
    ) -> None:
        args = EngineArgs(target_itl_ms=target)
        assert args.step_target_ms(on_cpu=True) == on_cpu
        assert args.step_target_ms(on_cpu=False) == elsewhere
        limits = own(target_itl_ms=target).llm_engine.engine.limits
        assert limits["target_itl_ms"] == on_cpu

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs must be from 1 to 65536, got 0"),
            ({"max_num_seqs": 2**31 - 1}, "max_num_seqs must be from 1 to 65536"),
            ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
            ({"max_num_seqs": None}, "max_num_seqs must be an integer, got None"),
            ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be from 1"),
            ({"max_num_batched_tokens": 2**40}, "max_num_batched_tokens must be from 1"),
            ({"block_size": "16"}, "block_size must be an integer, got '16'"),
            ({"block_size": 2**31}, "block_size must be from 1"),
            ({"max_model_len": 257}, "max_model_len must be at most 256, .* got 257"),
            ({"num_kv_blocks": 2**31}, "num_kv_blocks must be from 1 to 2147483647"),
            ({"num_kv_blocks": None, "kv_cache_memory": 10}, "one KV block takes .* the 10 bytes"),
            ({"kv_cache_memory": 2**63}, f"kv_cache_memory must be from 1 to {2**63 - 1}"),
            ({"target_itl_ms": 0}, "target_itl_ms must be above 0"),
            ({"target_itl_ms": float("nan")}, "target_itl_ms must be above 0"),
            ({"target_itl_ms": float("inf")}, "target_itl_ms must be above 0 and finite"),
            ({"target_itl_ms": "fast"}, "target_itl_ms must be a number, got 'fast'"),
            ({"seed": -1}, "seed must be from 0"),
            ({"seed": "x"}, "seed must be an integer, got 'x'"),
            ({"threads": 0}, "threads must be from 1"),
            ({"dtype": "int8"}, "dtype must be one of auto, .* got 'int8'"),
            ({"device": "nope"}, "device 'nope' cannot be used"),
            ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
            ({"model": 5}, "model must be a text"),
            ({"model": ""}, "model must be a text that is not empty"),
            ({"model": "/no/such/model"}, "/no/such/model"),
            ({"tokenizer": "/no/such/tokenizer"}, "/no/such/tokenizer"),
            ({"chat_template": 5}, "chat_template must be a text"),
            ({"served_model_name": ""}, "served_model_name must be a text that is not empty"),
        ],
    )
    def test_a_bad_one_is_named(
        self, tiny_model: Path, settings: dict[str, Any], words: str
    ) -> None:
        sizes = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 128}
        with pytest.raises(ValueError, match=words):
            LLM(**({"model": str(tiny_model)} | sizes | settings))

    def test_a_cache_beyond_the_memory(self, tiny_model: Path) -> None:
        from miniinfer.errors import KVCacheError

        with pytest.raises(KVCacheError, match="num_kv_blocks"):
            make_llm(tiny_model, num_kv_blocks=2**31 - 1)

    def test_an_unknown_one(self) -> None:
        with pytest.raises(TypeError, match="gpu_memory"):
            LLM(gpu_memory=0.9)


class TestFailures:
    def break_forward(self, llm: LLM, errors: list[BaseException | None]) -> None:
        """The next steps raise these errors, one each; where there is None, nothing happens."""
        runner = llm.llm_engine.engine.runner
        original = runner.run

        def run(buffers: Any) -> None:
            error = errors.pop(0) if errors else None
            if error is not None:
                raise error
            original(buffers)

        runner.run = run

    def test_a_failed_step_costs_its_requests_alone(
        self, own: Callable[..., LLM], caplog: pytest.LogCaptureFixture
    ) -> None:
        llm = own(max_num_seqs=2)
        expected = llm.generate("c", greedy())[0].token_ids
        self.break_forward(llm, [None, None, RuntimeError("no memory\nsecond line")])
        outputs = llm.generate(["a", "b", "c"], greedy())
        for output in outputs[:2]:
            assert output.stop_reason == "error"
            assert output.outputs[0].error == ("the forward pass failed: RuntimeError: no memory")
            assert len(output.token_ids) == 2
        assert outputs[2].token_ids == expected
        assert outputs[2].stop_reason == "max_tokens"
        assert "the forward pass failed" in caplog.text

    def test_failures_in_a_row_stop_the_engine(self, own: Callable[..., LLM]) -> None:
        llm = own(max_num_seqs=1)
        self.break_forward(llm, [RuntimeError("broken")] * 9)
        stream = llm.stream("s", greedy())
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate(["a", "b", "c", "d"], greedy())
        assert [output.stop_reason for output in stream] == ["error"]
        with pytest.raises(EngineDeadError, match="RuntimeError: broken"):
            llm.generate("a", greedy())
        with pytest.raises(EngineDeadError, match="RuntimeError: broken"):
            llm.stream("a", greedy())

    def test_failures_apart_do_not(self, own: Callable[..., LLM]) -> None:
        llm = own()
        self.break_forward(llm, [RuntimeError("x"), RuntimeError("x"), None] * 3)
        reasons = [llm.generate("a", greedy(1))[0].stop_reason for _ in range(9)]
        assert reasons == ["error", "error", "max_tokens"] * 3

    def test_interrupt_in_the_forward(self, own: Callable[..., LLM]) -> None:
        llm = own()
        expected = llm.generate(["a", "b"], greedy())
        for _ in range(4):
            self.break_forward(llm, [None, KeyboardInterrupt()])
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"], greedy())
            check_idle(llm.llm_engine.engine.core)
            assert ids_of(llm.generate(["a", "b"], greedy())) == ids_of(expected)

    @pytest.mark.parametrize("overlapped", [False, True])
    @pytest.mark.parametrize("call", ["plan", "commit", "drain"])
    def test_interrupt_right_after_a_call_of_the_core(
        self, own: Callable[..., LLM], call: str, overlapped: bool
    ) -> None:
        llm = own(async_scheduling=overlapped)
        expected = llm.generate(["a", "b"], greedy())
        engine = llm.llm_engine.engine

        class Interrupting:
            def __init__(self, core: Any) -> None:
                self.core = core
                self.calls = 0

            def __getattr__(self, name: str) -> Any:
                method = getattr(self.core, name)
                if name != call:
                    return method

                def interrupted(*arguments: Any) -> Any:
                    result = method(*arguments)
                    self.calls += 1
                    if self.calls == 3:
                        raise KeyboardInterrupt
                    return result

                return interrupted

        real = engine.core
        engine.core = engine._steps._core = Interrupting(real)
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"], greedy())
        finally:
            engine.core = engine._steps._core = real
        assert ids_of(llm.generate(["a", "b"], greedy())) == ids_of(expected)
        check_idle(engine.core)

    def test_logits_that_are_not_finite_end_their_request_alone(
        self, own: Callable[..., LLM]
    ) -> None:
        llm = own()
        expected = llm.generate(["a", "b"], greedy())

        def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
            if call == 3:
                logits = logits.clone()
                logits[0] = float("nan")
            return logits

        patch_logits(llm, spoil)
        outputs = llm.generate(["a", "b"], greedy())
        assert outputs[0].stop_reason == "error"
        assert "not finite" in (outputs[0].outputs[0].error or "")
        assert outputs[0].token_ids == expected[0].token_ids[:3]
        assert outputs[1].outputs == expected[1].outputs

    def test_rows_that_pad_the_vocabulary_are_never_sampled(
        self, own: Callable[..., LLM], tmp_path: Path
    ) -> None:
        folder = tiny.write_tiny_llama(tmp_path / "model", vocab_size=272)
        llm = own(folder)
        assert llm.llm_engine.engine.vocab_size == 260

        def prefer_padding(logits: torch.Tensor, _: int) -> torch.Tensor:
            assert logits.shape[1] == 272
            logits = logits.clone()
            logits[:, 260:] = 50.0
            return logits

        patch_logits(llm, prefer_padding)
        sampled = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5)
        for params in (greedy(20, logprobs=5), sampled):
            [output] = llm.generate("abc", params)
            assert max(output.token_ids) < 260
            assert max(max(row) for row in output.outputs[0].logprobs or []) < 260


class TestThreads:
    def test_calls_of_several_threads_are_each_what_they_are_alone(self, llm: LLM) -> None:
        prompts = [[number] * 5 for number in range(1, 7)]
        expected = ids_of(llm.generate(prompts, greedy()))

        def streamed(prompt: list[int]) -> list[int]:
            return [token for output in llm.stream(prompt, greedy()) for token in output.token_ids]

        with ThreadPoolExecutor(6) as pool:
            whole = [pool.submit(llm.generate, prompts, greedy()) for _ in range(12)]
            pieces = [pool.submit(streamed, prompt) for prompt in prompts]
            for call in whole:
                assert ids_of(call.result(60)) == expected
            assert [call.result(60) for call in pieces] == expected

    def test_a_stream_that_another_thread_has_computed(self, llm: LLM) -> None:
        stream = llm.stream([1, 2, 3], greedy())
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(llm.generate, [4, 5], greedy()).result(60)
        assert other[0].finished
        tokens = [token for output in stream for token in output.token_ids]
        assert tokens == llm.generate([1, 2, 3], greedy())[0].token_ids


def test_torchs_threads_spin_briefly_in_a_program_too(tiny_model: Path) -> None:
    program = (
        "import os, sys, miniinfer; "
        "miniinfer.LLM(model=sys.argv[1], device='cpu', num_kv_blocks=64).close(); "
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    clean = {name: value for name, value in os.environ.items() if "GOMP" not in name}
    clean.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_model)],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
    )
    assert done.stdout == "1000\n"
