"""The step loop driven by hand: requests added, aborted and read in every state."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import SIZES, check_idle, greedy
from miniinfer import (
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    ParameterError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Any]:
    """Make engines; they must be idle at the end."""
    made = []

    def make_one(**sizes: Any) -> LLMEngine:
        args = EngineArgs(model=str(tiny_model), **(SIZES | sizes))
        made.append(LLMEngine.from_engine_args(args))
        return made[-1]

    yield make_one
    for engine in made:
        check_idle(engine.engine.core)
        assert not engine._by_choice
        assert not engine._submissions


def run(engine: LLMEngine, most: int = 1000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; what each request yielded."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"not finished after {most} steps")


def delta(max_tokens: int, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, output_kind=RequestOutputKind.DELTA, **fields)


def test_an_idle_engine_steps_over_nothing(make: Any) -> None:
    engine = make()
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert engine.stats()["num_steps"] == 0


def test_kinds_of_output(make: Any) -> None:
    engine = make()
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "same", greedy(10, output_kind=kind, logprobs=1))
    outputs = run(engine)
    [final] = outputs["FINAL_ONLY"]
    assert final.finished
    assert len(final.token_ids) == 10
    deltas, whole = outputs["DELTA"], outputs["CUMULATIVE"]
    assert "".join(output.text for output in deltas) == final.text
    assert [token for output in deltas for token in output.token_ids] == final.token_ids
    assert whole[-1].outputs == final.outputs
    for shorter, longer in itertools.pairwise(whole):
        assert longer.text.startswith(shorter.text)
        assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
        assert len(longer.token_ids) > len(shorter.token_ids)
    for some in (deltas, whole):
        assert [output.finished for output in some] == [False] * (len(some) - 1) + [True]
        for output in some:
            assert len(output.outputs[0].logprobs or []) == len(output.token_ids)


def test_choices_of_each_kind(make: Any) -> None:
    engine = make(max_num_seqs=2)
    for kind in RequestOutputKind:
        params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, output_kind=kind)
        engine.add_request(kind.name, "same", params)
    outputs = run(engine)
    [final] = outputs["FINAL_ONLY"]
    assert [choice.index for choice in final.outputs] == [0, 1, 2]
    assert outputs["CUMULATIVE"][-1].outputs == final.outputs
    assert all(len(output.outputs) == 3 for output in outputs["CUMULATIVE"])
    texts = ["", "", ""]
    for output in outputs["DELTA"]:
        for choice in output.outputs:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in final.outputs]


def test_a_snapshot_does_not_change_later(make: Any) -> None:
    engine = make()
    engine.add_request("a", "same", greedy(6, logprobs=0))
    outputs = run(engine)["a"]
    lengths = [len(output.token_ids) for output in outputs]
    assert len(set(lengths)) == len(lengths) > 2
    assert lengths == sorted(lengths)
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == [
        len(output.token_ids) for output in outputs
    ]


class TestIds:
    def test_one_of_the_engines_choosing(self, make: Any) -> None:
        engine = make()
        first = engine.add_request(None, "a", greedy(1))
        engine.add_request("request-2", "a", greedy(1))
        third = engine.add_request(None, "a", greedy(1))
        assert len({first, "request-2", third}) == 3
        assert set(run(engine)) == {first, "request-2", third}

    def test_one_in_use_is_refused_and_the_first_lives(self, make: Any) -> None:
        engine = make()
        engine.add_request("same", "a", greedy(4))
        for _ in range(2):
            with pytest.raises(ParameterError, match="'same' is already in use") as caught:
                engine.add_request("same", "b", greedy(4))
            assert caught.value.param == "request_id"
            engine.step()
        assert run(engine)["same"][-1].prompt == "a"
        # Free again once its last output was taken.
        engine.add_request("same", "b", greedy(1))
        assert run(engine)["same"][-1].prompt == "b"

    def test_a_refused_request_leaves_its_id_free(self, make: Any) -> None:
        engine = make()
        with pytest.raises(ValueError, match="empty"):
            engine.add_request("a", "", greedy(1))
        assert not engine.has_unfinished_requests()
        engine.add_request("a", "b", greedy(1))
        run(engine)


class TestAbort:
    def end(self, engine: LLMEngine, request_id: str) -> RequestOutput:
        """Its last output."""
        last = run(engine)[request_id][-1]
        assert engine.is_finished(request_id)
        return last

    def test_before_the_first_step(self, make: Any) -> None:
        engine = make()
        engine.add_request("a", "x", greedy(5))
        assert engine.abort_request("a")
        assert engine.has_unfinished_requests()
        assert not engine.is_finished("a")
        last = self.end(engine, "a")
        assert (last.finished, last.stop_reason, last.token_ids) == (True, "cancelled", [])
        assert engine.stats()["num_steps"] == 0

    def test_while_waiting(self, make: Any) -> None:
        engine = make(max_num_seqs=1)
        engine.add_request("running", "x", delta(20))
        engine.add_request("waiting", "y", delta(20))
        for _ in range(3):
            engine.step()
        assert engine.stats()["num_requests_waiting"] == 1
        assert engine.abort_request("waiting")
        outputs = engine.step()
        by_id = {output.request_id: output for output in outputs}
        assert by_id["waiting"].stop_reason == "cancelled"
        assert engine.is_finished("waiting")
        assert not engine.is_finished("running")
        assert self.end(engine, "running").stop_reason == "max_tokens"

    def test_in_the_middle_of_a_prefill(self, make: Any) -> None:
        engine = make(max_num_batched_tokens=16)
        engine.add_request("a", "x" * 60, greedy(5))
        engine.step()
        engine.step()
        assert engine.stats()["prefill_tokens"] == 32
        assert engine.abort_request("a")
        last = self.end(engine, "a")
        assert (last.stop_reason, last.token_ids) == ("cancelled", [])
        assert engine.stats()["prefill_tokens"] == 32

    def test_while_decoding(self, make: Any) -> None:
        engine = make()
        engine.add_request("a", "x", greedy(50))
        for _ in range(4):
            engine.step()
        assert engine.abort_request("a")
        last = self.end(engine, "a")
        assert (last.stop_reason, len(last.token_ids)) == ("cancelled", 4)

    def test_while_preempted(self, make: Any) -> None:
        engine = make(num_kv_blocks=9, max_model_len=36)
        for name in "abc":
            engine.add_request(name, name * 5, delta(25))
        while engine.stats()["num_preemptions"] == 0:
            engine.step()
        assert engine.abort_request("c")
        assert run(engine)["c"][-1].stop_reason == "cancelled"

    def test_one_of_several_choices_is_all_of_them(self, make: Any) -> None:
        engine = make(max_num_seqs=2)
        engine.add_request("a", "x", greedy(50, n=4))
        engine.step()
        engine.step()
        engine.abort_request("a")
        last = self.end(engine, "a")
        assert [choice.finish_reason for choice in last.outputs] == ["abort"] * 4

    def test_twice_finished_and_unknown(self, make: Any) -> None:
        engine = make()
        assert not engine.abort_request("never")
        engine.add_request("a", "x", greedy(50))
        engine.step()
        assert engine.abort_request("a")
        assert engine.abort_request("a")
        outputs = run(engine)["a"]
        assert [output.finished for output in outputs] == [True]
        assert not engine.abort_request("a")
        engine.add_request("b", "x", greedy(1))
        run(engine)
        assert not engine.abort_request("b")
        assert engine.stats()["finished_abort"] == 1
        assert engine.stats()["finished_length"] == 1

    def test_discarded_is_not_heard_of_again(self, make: Any) -> None:
        engine = make()
        engine.add_request("a", "x", greedy(50))
        engine.add_request("b", "x", greedy(4))
        engine.step()
        engine.discard_request("a")
        engine.discard_request("a")
        engine.discard_request("never")
        assert set(run(engine)) == {"b"}
        assert engine.stats()["finished_abort"] == 1

    def test_seats_of_aborted_requests_are_free_at_once(self, make: Any) -> None:
        engine = make(max_num_seqs=4, max_num_batched_tokens=16)
        for round_ in range(3):
            names = [f"{round_}-{i}" for i in range(8)]
            for name in names:
                engine.add_request(name, "x" * (5 + round_ * 20), delta(30))
            engine.step()
            for name in names:
                engine.abort_request(name)
            engine.add_request(f"next-{round_}", "y", delta(2))
            ended = {output.request_id for output in engine.step()}
            assert ended >= set(names)
            assert engine.stats()["num_requests_running"] == 1
            assert engine.stats()["num_requests_waiting"] == 0
        run(engine)


class TestFailure:
    def test_the_last_outputs_come_with_the_next_step(self, make: Any) -> None:
        engine = make()
        engine.add_request("a", "x", greedy(5))
        engine.step()
        # A second request is in no step yet when the engine gives up.
        engine.engine._steps._failures = 2
        engine.add_request("b", "y" * 60, greedy(5))

        def fail(buffers: Any) -> None:
            raise RuntimeError("broken")

        engine.engine.runner.run = fail
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
        outputs = run(engine)
        assert {name: output[-1].stop_reason for name, output in outputs.items()} == {
            "a": "error",
            "b": "error",
        }
        assert outputs["a"][-1].token_ids
        with pytest.raises(EngineDeadError, match="RuntimeError: broken"):
            engine.add_request("c", "z", greedy(5))
        assert engine.step() == []

    def test_a_defect_in_the_core_stops_it(self, make: Any) -> None:
        engine = make()
        engine.add_request("a", "x", greedy(5))

        class PanicException(BaseException):
            """What a panic in the core becomes."""

        def panic(buffers: Any) -> None:
            raise PanicException("at the disco")

        engine.engine.runner.run = panic
        with pytest.raises(PanicException):
            engine.step()
        assert run(engine)["a"][-1].stop_reason == "error"
        with pytest.raises(EngineDeadError, match="PanicException: at the disco"):
            engine.add_request("b", "x", greedy(5))


def test_stop_string_frees_by_the_next_look(make: Any) -> None:
    engine = make()
    engine.add_request("probe", "x", greedy(12))
    text = run(engine)["probe"][-1].text
    # Any character that the text holds once, or at its end.
    stop = next(character for character in text if character.isascii() and character.isprintable())
    engine.add_request("a", "x", greedy(12, stop=stop))
    last = run(engine)["a"][-1]
    assert (last.stop_reason, last.outputs[0].stop_reason) == ("stop", stop)
    assert last.text == text.partition(stop)[0]
    assert engine.stats()["num_requests_running"] == 0
    assert engine.stats()["finished_stop"] == 1
