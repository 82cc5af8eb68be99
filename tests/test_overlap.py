"""Overlapped steps give what steps one after the other give, on a device that is late."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import SIZES, check_idle, greedy, make_llm, whole
from fake_device import ThreadQueue, make_asynchronous
from miniinfer import (
    LLM,
    AsyncLLM,
    EngineArgs,
    LLMEngine,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from miniinfer.execution.queue import InlineQueue, queue_for
from miniinfer.runner import put_pending
from tiny import EOS, write_tiny_llama

pytestmark = pytest.mark.filterwarnings("error")

Make = Callable[..., tuple[LLM, ThreadQueue]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    devices: list[ThreadQueue] = []

    def make(**sizes: Any) -> tuple[LLM, ThreadQueue]:
        llm = make_llm(folder, async_scheduling=True, **sizes)
        devices.append(make_asynchronous(llm.llm_engine))
        return llm, devices[-1]

    yield make
    for device in devices:
        device.close()


PROMPTS = [f"prompt {number} " * (1 + number % 5) for number in range(12)]


def results(llm: LLM, prompts: list[str], params: Any) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [
            (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
            for choice in output.outputs
        ]
        for output in outputs
    ]


def flat(positions: Any) -> list[Any]:
    """Ids, ranks and log probabilities; the latter are rounded otherwise in another batch."""
    return [
        (token, each.rank, pytest.approx(each.logprob, abs=1e-4))
        for position in positions
        for token, each in position.items()
    ]


MIXED = [
    greedy(9),
    greedy(17, ignore_eos=False, stop=["a", "\x00"]),
    SamplingParams(temperature=1.0, seed=5, max_tokens=13, top_p=0.9, n=2),
    SamplingParams(temperature=0.8, seed=6, max_tokens=11, frequency_penalty=1.0),
    greedy(1),
    greedy(12, min_tokens=4, ignore_eos=False, stop_token_ids=list(range(0, 250, 3))),
    greedy(10, logit_bias={65: 50.0}),
    greedy(10, bad_words=["A"]),
    greedy(8, allowed_token_ids=[65, 66, 67]),
    greedy(14, repetition_penalty=1.4, logprobs=2),
    SamplingParams(temperature=1.0, seed=8, max_tokens=15, min_p=0.01),
    greedy(20, prompt_logprobs=1),
]


class TestTokens:
    @pytest.mark.parametrize(
        "sizes",
        [
            {},
            {"max_num_seqs": 3, "max_num_batched_tokens": 11},
            {"num_kv_blocks": 34, "max_num_batched_tokens": 40},
            {"enable_prefix_caching": False},
        ],
        ids=["plain", "small steps", "small cache", "no prefix cache"],
    )
    def test_all_kinds_of_requests_get_what_they_get_one_step_at_a_time(
        self, make: Make, folder: Path, sizes: dict[str, Any]
    ) -> None:
        expected = results(make_llm(folder, **sizes), PROMPTS, MIXED)
        llm, device = make(**sizes)
        assert results(llm, PROMPTS, MIXED) == expected
        assert device.most_in_flight == 2
        check_idle(llm.llm_engine.engine.core)

    def test_logprobs_of_prompts_and_answers(self, make: Make, folder: Path) -> None:
        params = greedy(6, logprobs=3, prompt_logprobs=2)
        sizes: dict[str, Any] = {"max_num_batched_tokens": 16}
        plain = make_llm(folder, **sizes).generate(PROMPTS, params, use_tqdm=False)
        late = make(**sizes)[0].generate(PROMPTS, params, use_tqdm=False)
        for one, other in zip(plain, late, strict=True):
            assert flat(one.prompt_logprobs[1:]) == flat(other.prompt_logprobs[1:])
            assert flat(one.outputs[0].logprobs) == flat(other.outputs[0].logprobs)

    def test_grammars_are_followed(self, make: Make, folder: Path) -> None:
        form = StructuredOutputsParams(regex="(ab|cd){3}")
        params = [greedy(20, structured_outputs=form, ignore_eos=False), greedy(20)] * 3
        expected = results(make_llm(folder), PROMPTS[:6], params)
        llm, _ = make()
        assert results(llm, PROMPTS[:6], params) == expected
        check_idle(llm.llm_engine.engine.core)

    def test_preempted_requests_come_back(self, make: Make, folder: Path) -> None:
        prompts = [f"{number}" * 10 for number in range(8)]
        expected = results(make_llm(folder), prompts, greedy(60))
        llm, _ = make(num_kv_blocks=40, max_num_seqs=8)
        assert results(llm, prompts, greedy(60)) == expected
        assert llm.llm_engine.stats()["num_preemptions"] > 0
        check_idle(llm.llm_engine.engine.core)

    def test_what_another_request_computed_is_reused(self, make: Make, folder: Path) -> None:
        llm, _ = make()
        first = llm.generate("the same beginning, and", greedy(5), use_tqdm=False)[0]
        second = llm.generate("the same beginning, or", greedy(5), use_tqdm=False)[0]
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 20
        plain = make_llm(folder).generate("the same beginning, or", greedy(5), use_tqdm=False)[0]
        assert second.outputs[0].token_ids == plain.outputs[0].token_ids


class TestSteps:
    def engine(self, folder: Path, **sizes: Any) -> tuple[LLMEngine, ThreadQueue]:
        args = EngineArgs(model=str(folder), async_scheduling=True, **(SIZES | sizes))
        engine = LLMEngine(args)
        return engine, make_asynchronous(engine)

    def test_each_step_hands_one_on_and_the_last_one_leaves_nothing_under_way(
        self, folder: Path
    ) -> None:
        engine, device = self.engine(folder)
        engine.add_request("a", "one", greedy(4))
        lengths = []
        while engine.has_unfinished_requests():
            lengths += [len(output.outputs[0].token_ids) for output in engine.step()]
        assert lengths == [1, 2, 3, 4]
        assert device.in_flight == 0
        assert device.waits == 4
        check_idle(engine.engine.core)
        device.close()

    def test_a_request_that_ends_early_leaves_a_step_behind_that_is_drained(
        self, folder: Path
    ) -> None:
        engine, device = self.engine(folder)
        every = list(range(EOS))
        engine.add_request("a", "one", greedy(9, min_tokens=3, stop_token_ids=every))
        while engine.has_unfinished_requests():
            last = engine.step()
        assert [output.outputs[0].finish_reason for output in last] == ["stop"]
        assert device.in_flight == 0
        check_idle(engine.engine.core)
        device.close()

    def test_abort_between_steps(self, folder: Path) -> None:
        engine, device = self.engine(folder)
        engine.add_request("gone", "one", greedy(90))
        engine.add_request("stays", "two", greedy(20))
        ends = {}
        for number in range(60):
            if number == 5:
                assert engine.abort_request("gone")
            for output in engine.step():
                ends[output.request_id] = output.outputs[0].finish_reason
        assert ends == {"gone": "abort", "stays": "length"}
        check_idle(engine.engine.core)
        device.close()


def break_forward(llm: Any, on: set[int]) -> None:
    """Have the forward passes of these numbers fail, on the device."""
    model = llm.engine.runner.model
    forward, number = model.forward, 0

    def broken(batch: Any) -> Any:
        nonlocal number
        number += 1
        if number in on:
            raise RuntimeError(f"forward {number} broke\nin detail")
        return forward(batch)

    model.forward = broken


class TestFailures:
    @pytest.mark.parametrize("number", [1, 2, 3, 5])
    def test_a_forward_that_fails_ends_those_of_its_step_and_no_others(
        self, make: Make, number: int, folder: Path
    ) -> None:
        llm, device = make(max_num_seqs=2)
        break_forward(llm.llm_engine, {number})
        outputs, errors = [], []
        engine = llm.llm_engine
        for index in range(6):
            engine.add_request(str(index), PROMPTS[index], greedy(5))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    (errors if output.outputs[0].error else outputs).append(output)
        assert 1 <= len(errors) <= 2
        assert len(outputs) + len(errors) == 6
        for output in errors:
            expected = f"the forward pass failed: RuntimeError: forward {number} broke"
            assert output.outputs[0].error == expected
        plain = results(make_llm(folder), PROMPTS[:6], greedy(5))
        for output in outputs:
            tokens = plain[int(output.request_id)][0][0]
            assert output.outputs[0].token_ids == tokens
        assert device.in_flight == 0
        check_idle(engine.engine.core)

    def test_too_many_in_a_row_stop_the_engine(self, make: Make) -> None:
        llm, _ = make()
        break_forward(llm.llm_engine, set(range(100)))
        engine = llm.llm_engine

        def three_steps() -> None:
            for index in range(3):
                engine.add_request(str(index), PROMPTS[index], greedy(5))
                engine.step()

        with pytest.raises(RuntimeError, match="forward 3 broke"):
            three_steps()
        engine.step()
        assert not engine.has_unfinished_requests()
        check_idle(engine.engine.core)

    def test_an_interrupt_loses_what_is_under_way_and_not_the_engine(
        self, make: Make, folder: Path
    ) -> None:
        llm, device = make()
        engine = llm.llm_engine
        engine.add_request("lost", "one", greedy(30))
        engine.step()
        runner = engine.engine.runner
        launch = runner.launch

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        runner.launch = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        runner.launch = launch
        last = [output for output in engine.step() if output.finished]
        assert [output.outputs[0].error for output in last] == [
            "the forward pass failed: KeyboardInterrupt: "
        ]
        assert device.in_flight == 0
        expected = results(make_llm(folder), PROMPTS[:2], greedy(5))
        assert results(llm, PROMPTS[:2], greedy(5)) == expected
        check_idle(engine.engine.core)

    def test_logits_that_are_not_finite_end_their_request_alone(
        self, make: Make, folder: Path
    ) -> None:
        llm, _ = make()
        model = llm.llm_engine.engine.runner.model
        logits, calls = model.logits, 0

        def poisoned(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            found = logits(hidden, index)
            if calls == 3:
                found[0] = torch.nan
            return found

        model.logits = poisoned
        engine = llm.llm_engine
        for index in range(3):
            engine.add_request(str(index), PROMPTS[index], greedy(6))
        ends: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            ends |= {each.request_id: each for each in engine.step() if each.finished}
        bad = [name for name, output in ends.items() if output.outputs[0].error]
        assert len(bad) == 1
        plain = results(make_llm(folder), PROMPTS[:3], greedy(6))
        for name in set(ends) - set(bad):
            assert ends[name].outputs[0].token_ids == plain[int(name)][0][0]
        check_idle(engine.engine.core)


class TestAsync:
    async def test_cancels_stops_and_readers_in_an_event_loop(self, folder: Path) -> None:
        plain = make_llm(folder, num_kv_blocks=48)
        prompts = [f"{number} and more" for number in range(16)]
        expected = results(plain, prompts, greedy(24))
        args = EngineArgs(
            model=str(folder), async_scheduling=True, **(SIZES | {"num_kv_blocks": 48})
        )
        llm = AsyncLLM(args)
        device = make_asynchronous(llm)
        try:

            async def read(number: int) -> list[int] | None:
                tokens: list[int] = []
                stream = llm.generate(prompts[number], greedy(24))
                async for output in stream:
                    tokens = list(output.outputs[0].token_ids)
                    if number % 3 == 2 and len(tokens) >= number % 7:
                        await stream.aclose()
                        return None
                return tokens

            got = await asyncio.gather(*(read(number) for number in range(16)))
            for number, tokens in enumerate(got):
                if number % 3 != 2:
                    assert tokens == expected[number][0][0]
            last = await whole(llm, "stop", greedy(40, stop=["e", "a", "\x00"]))
            assert last.finished
            assert device.most_in_flight == 2
        finally:
            await llm.close()
            device.close()
        assert llm.stats()["kv_blocks_used"] == 0

    async def test_forms_stops_and_cancels_in_one_batch_that_is_preempted(
        self, folder: Path
    ) -> None:
        form = StructuredOutputsParams(regex="(ab|cd){3,40}")
        kinds = [
            greedy(40, structured_outputs=form, ignore_eos=False),
            greedy(40, stop=["e", "a", "\x00"]),
            greedy(40, structured_outputs=form, ignore_eos=False, stop=["ba", "dc"]),
            greedy(80),
        ]
        params = [kinds[number % 4] for number in range(16)]
        prompts = [f"{number} and more" for number in range(16)]
        cancelled = {1, 4, 6, 7, 10, 12}
        expected = results(make_llm(folder), prompts, params)
        sizes = SIZES | {"num_kv_blocks": 32, "max_num_batched_tokens": 40}
        llm = AsyncLLM(EngineArgs(model=str(folder), async_scheduling=True, **sizes))
        device = make_asynchronous(llm)
        try:

            async def read(number: int) -> Any:
                stream = llm.generate(prompts[number], params[number])
                async for output in stream:
                    last = output.outputs[0]
                    if number in cancelled and len(last.token_ids) >= number % 5:
                        await stream.aclose()
                        return None
                return [(last.token_ids, last.text, last.finish_reason, last.stop_reason)]

            for _ in range(2):
                found = await asyncio.gather(*(read(number) for number in range(16)))
                for number, one in enumerate(found):
                    assert one == (None if number in cancelled else expected[number])
            assert device.most_in_flight == 2
            assert llm.stats()["num_preemptions"] > 0
        finally:
            await llm.close()
            device.close()
        assert llm.stats()["kv_blocks_used"] == 0


class TestParts:
    def test_a_cpu_does_everything_at_once_unless_asked(self, folder: Path) -> None:
        assert isinstance(queue_for(torch.device("cpu")), InlineQueue)
        assert not make_llm(folder).llm_engine.engine._steps._overlapped
        assert make_llm(folder, async_scheduling=True).llm_engine.engine._steps._overlapped

    def test_overlapped_without_a_late_device(self, folder: Path) -> None:
        expected = results(make_llm(folder), PROMPTS, MIXED)
        llm = make_llm(folder, async_scheduling=True)
        assert results(llm, PROMPTS, MIXED) == expected
        check_idle(llm.llm_engine.engine.core)

    def test_pending_tokens_come_from_where_source_says_and_are_always_valid(self) -> None:
        ids = torch.tensor([0, 0, 0, 7], dtype=torch.int32)
        source = torch.tensor([2, 0, 1], dtype=torch.int32)
        put_pending(ids, source, torch.tensor([5, -1, 9], dtype=torch.int32))
        assert ids.tolist() == [9, 5, 0, 7]
        put_pending(ids, source, None)
        assert ids.tolist() == [9, 5, 0, 7]

    @pytest.mark.parametrize("name", ["async_scheduling", "enforce_eager"])
    def test_settings_are_checked(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be true or false, got 'yes'"):
            EngineArgs(**{name: "yes"})

    def test_a_request_that_can_never_run_is_still_refused(self, make: Make) -> None:
        llm, _ = make()
        with pytest.raises(RequestError):
            llm.generate("x" * 200, greedy(5), use_tqdm=False)
