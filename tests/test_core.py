"""The boundary to the compiled core: misuse is an error that names what is wrong, never a crash."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from miniinfer import _core

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "eos_token_ids": [tiny.EOS],
    "block_size": 4,
    "num_blocks": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "text_thread": False,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return (folder / "tokenizer.json").read_bytes()


Make = Callable[..., "_core.Engine"]


@pytest.fixture
def make(tokenizer_json: bytes) -> Make:
    def make_one(**changes: Any) -> _core.Engine:
        return _core.Engine(**({"tokenizer_json": tokenizer_json} | SIZES | changes))

    return make_one


def arrays_of(core: Any) -> dict[str, Any]:
    return {name: np.zeros(length, dtype) for name, dtype, length in core.array_specs()}


def started(core: Any, slot: int = 0) -> dict[str, Any]:
    arrays = arrays_of(core)
    core.register_slot(slot, arrays)
    return arrays


def texts(core: Any) -> dict[int, Any]:
    return dict(core.drain())


def finish(core: Any, arrays: dict[str, Any], most: int = 100) -> None:
    """Step with token 65 for everything until nothing is left to plan."""
    for _ in range(most):
        if not core.plan(0):
            return
        arrays["sampled"][:] = 65
        core.commit(0)
    raise AssertionError("there is no end to it")


class TestMaking:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"block_size": 0}, "block_size must be at least 1"),
            ({"num_blocks": 0}, "num_blocks must be at least 1"),
            ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
            ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens \(3\) must be .* \(4\)"),
            ({"max_model_len": 65}, "65 tokens but the KV cache holds 64"),
            ({"max_model_len": 2**31}, "max_model_len must be at most 2147483647"),
            ({"target_itl_ms": -1.0}, "target_itl_ms must be a positive number"),
            ({"stall_limit": -1.0}, "stall_limit must be at least 0 seconds"),
            ({"stall_limit": float("nan")}, "stall_limit must be at least 0 seconds"),
            ({"tokenizer_json": b"{"}, "tokenizer"),
            ({"tokenizer_json": b"\xff\xfe"}, "tokenizer"),
        ],
    )
    def test_what_cannot_work(self, make: Make, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            make(**changes)

    @pytest.mark.parametrize(
        "changes", [{"block_size": -1}, {"block_size": 2**32}, {"vocab_size": -1}]
    )
    def test_what_does_not_fit_its_type(self, make: Make, changes: dict[str, Any]) -> None:
        with pytest.raises(OverflowError):
            make(**changes)

    def test_an_array_has_the_numpy_type_it_says(self, make: Make) -> None:
        specs = make().array_specs()
        assert {dtype for _, dtype, _ in specs} == {"int32", "int64", "float32"}
        assert len({name for name, _, _ in specs}) == len(specs)
        assert all(length > 0 for _, _, length in specs)


class TestArrays:
    def test_each_may_be_missing_short_or_of_another_type(self, make: Make) -> None:
        core = make()
        for name, array in arrays_of(core).items():
            read_only = array.copy()
            read_only.setflags(write=False)
            wrong = [
                (array[:-1].copy(), ValueError),
                (array.astype(np.float64), ValueError),
                (array.astype(np.int16), ValueError),
                (array.astype(array.dtype.newbyteorder()), ValueError),
                (read_only, ValueError),
                (np.zeros(2 * len(array), array.dtype)[::2], ValueError),
                (list(array), ValueError),
                (None, ValueError),
                (b"", ValueError),
            ]
            for value, error in wrong:
                with pytest.raises(error, match=rf"array {name}\b"):
                    core.register_slot(0, arrays_of(core) | {name: value})
            others = arrays_of(core)
            del others[name]
            with pytest.raises(KeyError, match=f"array {name} is missing"):
                core.register_slot(0, others)
        with pytest.raises(RuntimeError, match="slot 0 has no arrays"):
            core.plan(0)

    def test_longer_ones_and_strangers_do_no_harm(self, make: Make) -> None:
        core = make()
        arrays = {name: np.zeros(2 * len(a), a.dtype) for name, a in arrays_of(core).items()}
        core.register_slot(0, arrays | {"stranger": 5})
        submission = core.submit([1, 2], GREEDY)
        finish(core, arrays)
        assert texts(core)[submission.ids()[0]].token_ids == [65] * 4

    def test_they_live_as_long_as_the_core_needs_them(self, make: Make) -> None:
        core = make()
        started(core)
        submission = core.submit([1, 2], GREEDY)
        assert core.plan(0) == 2
        core.commit(0)
        assert submission.ids()[1] == 1


class TestSlots:
    def test_there_are_two(self, make: Make) -> None:
        core = make()
        for slot in (2, 3, 2**40):
            with pytest.raises(RuntimeError, match=f"slot must be 0 or 1, got {slot}"):
                core.register_slot(slot, arrays_of(core))
            for call in (core.plan, core.commit):
                with pytest.raises(RuntimeError, match=f"slot must be 0 or 1, got {slot}"):
                    call(slot)
            with pytest.raises(RuntimeError, match=f"slot must be 0 or 1, got {slot}"):
                core.fail_step(slot, "x")
        for call in (core.plan, core.commit, core.register_slot):
            with pytest.raises((OverflowError, TypeError)):
                call(-1)

    def test_calls_out_of_turn(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        with pytest.raises(RuntimeError, match="slot 0 is free; commit needs it to be in flight"):
            core.commit(0)
        with pytest.raises(RuntimeError, match="slot 0 is free; fail_step"):
            core.fail_step(0, "x")
        with pytest.raises(RuntimeError, match="slot 1 has no arrays"):
            core.plan(1)
        submission = core.submit([1, 2], GREEDY)
        assert core.plan(0) == 2
        for _ in range(2):
            with pytest.raises(RuntimeError, match="slot 0 is in flight; plan needs"):
                core.plan(0)
        with pytest.raises(RuntimeError, match="slot 1 has no arrays"):
            core.commit(1)
        finish_step(core, arrays)
        with pytest.raises(RuntimeError, match="slot 0 is free; commit"):
            core.commit(0)
        finish(core, arrays)
        assert texts(core)[submission.ids()[0]].token_ids == [65] * 4
        core.check()

    @pytest.mark.parametrize("look", ["check", "stats", "plan", "has_requests", "drain"])
    def test_a_look_in_the_middle_of_a_step_changes_nothing_of_it(
        self, make: Make, look: str
    ) -> None:
        core = make()
        arrays = started(core)
        gone, stays = core.submit([1, 2], GREEDY), core.submit([3, 4], GREEDY)
        assert core.plan(0) == 4
        gone.cancel()
        late = core.submit([5], GREEDY)
        if look == "plan":
            with pytest.raises(RuntimeError, match="in flight"):
                core.plan(0)
        else:
            getattr(core, look)()
        finish_step(core, arrays)
        finish(core, arrays)
        core.check()
        ends = {choice: delta.finish_reason for choice, delta in core.drain()}
        assert ends[gone.ids()[0]] == "abort"
        assert ends[stays.ids()[0]] == ends[late.ids()[0]] == "length"
        assert core.stats()["kv_blocks_used"] == 0

    def test_new_arrays_in_the_middle_of_a_step(self, make: Make) -> None:
        core = make()
        started(core)
        submission = core.submit([1, 2], GREEDY)
        core.plan(0)
        arrays = started(core)
        finish_step(core, arrays)
        finish(core, arrays)
        assert texts(core)[submission.ids()[0]].token_ids == [65] * 4
        core.check()

    def test_failing_a_step_and_the_engine(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        first = core.submit([1, 2], GREEDY)
        core.plan(0)
        waiting = core.submit([3], GREEDY)
        core.fail_step(0, "it broke")
        assert texts(core)[first.ids()[0]].error == "it broke"
        core.plan(0)
        core.fail("all is lost")
        assert texts(core)[waiting.ids()[0]].error == "all is lost"
        with pytest.raises(RuntimeError, match="free"):
            core.commit(0)
        assert core.plan(0) == 0
        with pytest.raises(_core.EngineDeadError, match="the engine has stopped: all is lost"):
            core.submit([1], GREEDY)
        core.fail("again")
        core.check()
        assert not core.has_requests()
        finish(core, arrays)

    def test_logit_edits(self, make: Make) -> None:
        core = make()
        started(core)

        def edits(count: int) -> list[Any]:
            return [np.zeros(count, dtype) for dtype in ("int32", "int32", "float32", "float32")]

        with pytest.raises(RuntimeError, match="slot 0 is free; logit_edits"):
            core.logit_edits(0, *edits(4))
        with pytest.raises(RuntimeError, match="slot must be 0 or 1"):
            core.logit_edits(7, *edits(4))
        submission = core.submit([1, 2], GREEDY | {"logit_bias": [(5, 1.5), (6, -2.0)]})
        assert core.plan(0) == 2
        with pytest.raises(ValueError, match="logit edits must hold 2 items, got 1"):
            core.logit_edits(0, *edits(1))
        given = edits(4)
        assert core.logit_edits(0, *given) == 2
        assert given[1].tolist()[:2] == [5, 6]
        assert given[3].tolist()[:2] == [1.5, -2.0]
        read_only = edits(4)
        read_only[2].setflags(write=False)
        with pytest.raises(ValueError, match="array repetition must be writable"):
            core.logit_edits(0, *read_only)
        with pytest.raises((TypeError, BufferError, ValueError)):
            core.logit_edits(0, *reversed(edits(4)))
        submission.close()


def finish_step(core: Any, arrays: dict[str, Any]) -> None:
    arrays["sampled"][:] = 65
    core.commit(0)


class TestSubmit:
    @pytest.mark.parametrize(
        ("prompt", "changes", "param", "words"),
        [
            ([], {}, "prompt", "the prompt is empty"),
            ([tiny.VOCAB], {}, "prompt", "below the vocabulary size of 260, got 260"),
            ([1, 2**32 - 1, 2], {}, "prompt", "got 4294967295"),
            ([1] * 64, {}, "max_tokens", "64 tokens leaves no room"),
            ([1] * 61, {}, "max_tokens", "61 tokens and max_tokens is 4: together 65"),
            ([1], {"max_tokens": 2**32 - 1}, "max_tokens", "together 4294967296"),
            ([1], {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
            ([1], {"n": 0}, "n", "n must be from 1 to 16384, got 0"),
            ([1], {"n": 2**32 - 1}, "n", "n must be from 1 to 16384, got 4294967295"),
            ([1], {"temperature": -1.0}, "temperature", "temperature must be"),
            ([1], {"temperature": float("nan")}, "temperature", "got NaN"),
            ([1], {"temperature": float("inf")}, "temperature", "got inf"),
            ([1], {"top_p": 0.0}, "top_p", "top_p must be"),
            ([1], {"min_p": 1.5}, "min_p", "min_p must be"),
            ([1], {"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
            ([1], {"presence_penalty": float("nan")}, "presence_penalty", "finite"),
            ([1], {"logprobs": 21}, "logprobs", "at most 20, got 21"),
            ([1], {"logit_bias": [(260, 1.0)]}, "logit_bias", "got 260"),
            ([1], {"logit_bias": [(1, float("nan"))]}, "logit_bias", "NaN for token 1"),
            ([1], {"stop_token_ids": [260]}, "stop_token_ids", "got 260"),
            ([1], {"stop": ["a", ""]}, "stop", "non-empty"),
        ],
    )
    def test_a_refusal_has_a_message_and_a_parameter(
        self, make: Make, prompt: list[int], changes: dict[str, Any], param: str, words: str
    ) -> None:
        core = make()
        with pytest.raises(_core.RequestError, match=words) as caught:
            core.submit(prompt, GREEDY | changes)
        assert caught.value.param == param
        assert caught.value.args == (str(caught.value),)
        assert not core.has_requests()

    @pytest.mark.parametrize(
        ("prompt", "changes"),
        [
            ([-1], {}),
            ([2**32], {}),
            ([1.5], {}),
            (["a"], {}),
            (None, {}),
            ([1], {"n": -1}),
            ([1], {"n": 2**40}),
            ([1], {"seed": -1}),
            ([1], {"priority": 2**31}),
            ([1], {"temperature": "hot"}),
            ([1], {"logit_bias": [(1,)]}),
            ([1], {"stop": "ab\ud800"}),
            ([1], {"stop": ["\ud800"]}),
        ],
    )
    def test_what_is_of_another_type(
        self, make: Make, prompt: Any, changes: dict[str, Any]
    ) -> None:
        core = make()
        with pytest.raises((TypeError, OverflowError, ValueError)):
            core.submit(prompt, GREEDY | changes)
        assert not core.has_requests()

    def test_temperature_must_be_given(self, make: Make) -> None:
        with pytest.raises((TypeError, KeyError, ValueError), match="temperature"):
            make().submit([1], {})

    def test_dropping_a_submission_cancels_it(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        core.submit([1], GREEDY)
        kept = core.submit([2], GREEDY)
        finish(core, arrays)
        assert list(texts(core)) == [kept.ids()[0]]
        assert core.stats()["finished_abort"] == 1

    def test_ids_are_never_reused(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        seen = set()
        for _ in range(5):
            submission = core.submit([1], GREEDY | {"n": 3})
            first, n = submission.ids()
            assert n == 3
            assert not seen & set(range(first, first + n))
            seen |= set(range(first, first + n))
            finish(core, arrays)
            submission.cancel()
            submission.close()
            submission.hold()
            submission.resume()
        core.check()

    def test_sampled_ids_out_of_range_do_not_crash(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        submission = core.submit([1], GREEDY)
        for sampled in (2**31 - 1, 300, 65):
            core.plan(0)
            arrays["sampled"][:] = sampled
            core.commit(0)
        core.plan(0)
        arrays["sampled"][:] = -1
        core.commit(0)
        [(_, delta)] = core.drain()
        assert delta.finish_reason == "error"
        assert "not finite" in (delta.error or "")
        assert delta.text == chr(33 + 65)
        assert submission.ids()[1] == 1
        core.check()


class TestWaiting:
    def test_times(self, make: Make) -> None:
        core = make()
        assert core.wait(0.0) is False
        assert core.wait_output(0.0) is False
        for wait in (core.wait, core.wait_output):
            for bad in (-1.0, float("nan")):
                with pytest.raises(ValueError, match="timeout must be at least 0 seconds"):
                    wait(bad)

    def test_a_submission_an_interrupt_and_an_output_end_it(self, make: Make) -> None:
        core = make()
        arrays = started(core)
        core.interrupt()
        assert core.wait() is True
        submission = core.submit([1], GREEDY)
        assert core.wait() is True
        finish(core, arrays)
        assert core.wait_output() is True
        assert submission.ids()[0] in texts(core)

    def test_a_look_at_the_state_loses_no_wake_up(self, make: Make) -> None:
        core = make()
        started(core)
        submission = core.submit([1], GREEDY)
        core.stats()
        core.check()
        assert core.wait(0.0) is True
        assert core.plan(0) == 1
        assert submission.ids()[1] == 1


def test_classes_cannot_be_made_or_changed(make: Make) -> None:
    for hidden in (_core.Delta, _core.Submission, _core.TokenLogprob):
        with pytest.raises(TypeError):
            hidden()
    with pytest.raises(AttributeError):
        make().anything = 1


def test_files_are_closed(tmp_path: Path) -> None:
    """Engines come and go without leaving descriptors behind."""
    tiny.write_tokenizer(tmp_path)
    # In a process of its own: what other tests left to the garbage collector closes when it likes.
    done = subprocess.run(
        [sys.executable, "-c", COUNT_DESCRIPTORS, str(tmp_path / "tokenizer.json")],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    before, during, after = map(int, done.stdout.split())
    assert during > before
    assert after == before


COUNT_DESCRIPTORS = """
import os, sys
from pathlib import Path
from miniinfer import _core
from test_core import GREEDY, SIZES

def count():
    return len(os.listdir("/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"))

def make():
    changes = {"tokenizer_json": Path(sys.argv[1]).read_bytes(), "text_thread": True}
    return _core.Engine(**(SIZES | changes))

make()
before = count()
cores = [make() for _ in range(5)]
submissions = [core.submit([1], GREEDY) for core in cores]
during = count()
del cores, submissions
print(before, during, count())
"""
