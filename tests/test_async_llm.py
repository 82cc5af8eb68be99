"""Generation in an event loop: streams, cancellation, death and storms, on a real engine."""

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import miniinfer
from engines import SIZES, check_idle, collect, greedy, whole
from miniinfer import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    ParameterError,
    RequestOutputKind,
    SamplingParams,
)

PATIENCE = 30.0
"""Seconds after which a wait is a hang, on however slow a machine."""


def delta(max_tokens: int | None, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, output_kind=RequestOutputKind.DELTA, **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


async def until_idle(llm: AsyncLLM) -> None:
    """Every request is gone and every block free."""
    core = llm.engine.core
    await until(lambda: not core.has_requests() and core.stats()["kv_blocks_used"] == 0)
    check_idle(core)
    assert not llm._by_choice
    assert not llm._ids


Make = Callable[..., AsyncLLM]


@pytest.fixture
async def make(tiny_model: Path) -> AsyncIterator[Make]:
    """Make engines that are closed at the end."""
    made: list[AsyncLLM] = []

    def make_one(**sizes: Any) -> AsyncLLM:
        args = EngineArgs(model=str(tiny_model), **(SIZES | sizes))
        made.append(AsyncLLM.from_args(args))
        return made[-1]

    yield make_one
    for llm in made:
        await llm.close()


class TestGenerate:
    async def test_many_at_once_are_each_what_they_are_alone(self, make: Make) -> None:
        llm = make()
        prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(24)]
        alone = [(await whole(llm, prompt, greedy(15))).token_ids for prompt in prompts]
        together = await asyncio.gather(*(whole(llm, p, greedy(15)) for p in prompts))
        assert [output.token_ids for output in together] == alone
        assert [output.prompt for output in together] == prompts
        await until_idle(llm)

    async def test_deltas_are_the_whole_answer(self, make: Make) -> None:
        llm = make()
        decode = llm.tokenizer.decode
        for prompt in ("a", "日本語", "😀 and é"):
            text, ids = "", []
            async for output in llm.generate(prompt, delta(60)):
                text += output.text
                ids += output.token_ids
                assert len(output.outputs) == 1
            last = await whole(llm, prompt, greedy(60))
            final = await whole(llm, prompt, greedy(60, output_kind=RequestOutputKind.FINAL_ONLY))
            assert text == last.text == final.text == decode(ids)
            assert ids == last.token_ids == final.token_ids
        await until_idle(llm)

    async def test_choices(self, make: Make) -> None:
        llm = make(max_num_seqs=2)
        params = SamplingParams(n=5, seed=3, max_tokens=9, ignore_eos=True)
        output = await whole(llm, "abc", params)
        assert [choice.index for choice in output.outputs] == [0, 1, 2, 3, 4]
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 5
        await until_idle(llm)

    async def test_what_is_refused_leaves_nothing(self, make: Make) -> None:
        llm = make()
        for prompt, params in (
            ("", greedy(4)),
            ([1, -1], greedy(4)),
            ([999], greedy(4)),
            ("x" * 127, greedy(4)),
            ("x", greedy(4, stop_token_ids=[999])),
        ):
            with pytest.raises(ValueError, match=r"prompt|token"):
                await whole(llm, prompt, params, request_id="mine")
        await until_idle(llm)
        assert (await whole(llm, "x", greedy(4), request_id="mine")).finished

    async def test_an_id_in_use(self, make: Make) -> None:
        llm = make()
        stream = llm.submit([1, 2], delta(50), request_id="mine")
        with pytest.raises(ParameterError, match="'mine' is already in use"):
            llm.submit([3], delta(5), request_id="mine")
        assert len((await collect(stream))[1]) == 50
        stream.close()
        again = llm.submit([3], delta(5), request_id="mine")
        assert len((await collect(again))[1]) == 5
        again.close()
        await until_idle(llm)


class TestCancel:
    async def test_closing_the_iterator(self, make: Make) -> None:
        llm = make()
        async with contextlib.aclosing(llm.generate("abc", delta(None))) as outputs:
            async for _ in outputs:
                break
        await until_idle(llm)
        stats = llm.stats()
        assert stats["kv_cache_tokens"] == stats["kv_blocks_total"] * llm.engine.args.block_size
        assert stats["finished_abort"] == 1
        assert stats["generation_tokens"] < 120

    async def test_cancelling_the_task(self, make: Make) -> None:
        llm = make()
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("abc", delta(None)):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        assert llm.stats()["finished_abort"] == 1

    async def test_dropping_it(self, make: Make) -> None:
        llm = make()
        stream = llm.submit([1, 2], delta(None))
        await anext(stream)
        del stream
        gc.collect()
        await until_idle(llm)
        llm.submit([1, 2], delta(None))
        await until_idle(llm)
        never_started = llm.generate("abc", delta(None))
        await never_started.aclose()
        await until_idle(llm)

    async def test_cancel_still_delivers_the_end(self, make: Make) -> None:
        llm = make()
        stream = llm.submit([1, 2], delta(None))
        await anext(stream)
        stream.cancel()
        stream.cancel()
        assert (await collect(stream))[2] == "abort"
        stream.cancel()
        stream.close()
        stream.close()
        assert [each async for each in stream] == []
        await until_idle(llm)

    async def test_closing_ends_the_wait_of_another_task(self, make: Make) -> None:
        llm = make()
        release = hold_up(llm)
        stream = llm.submit([1, 2], delta(None))
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="another reader"):
            await anext(stream)
        stream.close()
        async with asyncio.timeout(PATIENCE):
            assert (await reader)[2] is None
        release()
        await until_idle(llm)

    async def test_seats_and_ids_of_the_cancelled_are_free_at_once(self, make: Make) -> None:
        llm = make(max_num_seqs=2, max_num_batched_tokens=16)
        for _ in range(3):
            streams = [llm.submit([5] * 90, delta(None), request_id=str(i)) for i in range(6)]
            await until(lambda: llm.stats()["num_requests_running"] > 0)
            for stream in streams:
                stream.close()
        output = await whole(llm, "x", greedy(2), request_id="0")
        assert output.stop_reason == "max_tokens"
        await until_idle(llm)


class TestForward:
    async def test_gives_what_a_loop_gives(self, make: Make) -> None:
        llm = make()
        expected = await collect(llm.submit([1, 2], delta(60)))
        stream = llm.submit([1, 2], delta(60))
        taken = [await anext(stream)]
        async with asyncio.timeout(PATIENCE):
            await stream.forward(lambda each: taken.append(each) is None)
        assert "".join(each.text for each in taken) == expected[0]
        assert [token for each in taken for token in each.token_ids] == expected[1]
        assert taken[-1].finish_reason == expected[2]
        # There is nothing more, for either way to read.
        await stream.forward(taken.append)  # type: ignore[arg-type]
        assert [each async for each in stream] == []
        stream.close()
        await until_idle(llm)

    async def test_stops_when_told_and_goes_on_later(self, make: Make) -> None:
        llm = make()
        expected = await collect(llm.submit([1, 2], delta(100, n=1)))
        stream = llm.submit([1, 2], delta(100))
        taken: list[Any] = []

        def take(each: Any) -> bool:
            taken.append(each)
            return False

        async with asyncio.timeout(PATIENCE):
            while not taken or taken[-1].finish_reason is None:
                before = len(taken)
                await stream.forward(take)
                assert len(taken) == before + 1
        assert [token for each in taken for token in each.token_ids] == expected[1]
        stream.close()
        await until_idle(llm)

    async def test_what_the_taker_raises_is_the_readers_alone(self, make: Make) -> None:
        llm = make()
        release = hold_up(llm)
        stream, other = llm.submit([1, 2], delta(30)), llm.submit([1, 2], delta(30))
        rest = asyncio.create_task(collect(other))

        def fail(each: Any) -> bool:
            raise LookupError("nobody knows")

        reader = asyncio.create_task(stream.forward(fail))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="another reader"):
            await stream.forward(fail)
        release()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(LookupError, match="nobody knows"):
                await reader
            assert len((await rest)[1]) == 30
        stream.close()
        other.close()
        await until_idle(llm)

    async def test_ends_with_a_close_or_a_cancel(self, make: Make) -> None:
        llm = make()
        release = hold_up(llm)
        for end in ("close", "cancel"):
            stream = llm.submit([1, 2], delta(None))
            reader = asyncio.create_task(stream.forward(lambda each: True))
            await asyncio.sleep(0.02)
            if end == "close":
                stream.close()
                async with asyncio.timeout(PATIENCE):
                    await reader
            else:
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
                stream.close()
        release()
        await until_idle(llm)


def hold_up(llm: AsyncLLM) -> Callable[[], None]:
    """Stop the forward pass until the returned function is called."""
    import threading

    gate, original = threading.Event(), llm.engine.runner.run

    def run(buffers: Any) -> None:
        gate.wait(PATIENCE)
        original(buffers)

    llm.engine.runner.run = run  # type: ignore[method-assign]
    return gate.set


class TestSlowReaders:
    async def test_one_that_does_not_read_gets_it_all_later(self, make: Make) -> None:
        llm = make()
        expected = await collect(llm.submit([1, 2], delta(100)))
        slow = llm.submit([1, 2], delta(100))
        await anext_text(slow)
        others = await asyncio.gather(*(whole(llm, "x", greedy(100)) for _ in range(3)))
        assert {output.stop_reason for output in others} == {"max_tokens"}
        await until(lambda: not llm.engine.core.has_requests())
        slow.close()
        unread = llm.submit([1, 2], delta(100))
        await until(lambda: not llm.engine.core.has_requests())
        await asyncio.sleep(0.05)
        pieces = [each async for each in unread]
        assert "".join(each.text for each in pieces) == expected[0]
        assert [token for each in pieces for token in each.token_ids] == expected[1]
        assert pieces[-1].finish_reason == expected[2]
        # What waited was merged, so a late reader is not a hundred wake-ups late.
        assert len(pieces) < 20
        unread.close()
        await until_idle(llm)

    async def test_one_that_reads_now_and_then(self, make: Make) -> None:
        llm = make()
        expected = await collect(llm.submit([7, 8], delta(100)))
        text, ids = "", []
        stream = llm.submit([7, 8], delta(100))
        async for each in stream:
            text += each.text
            ids += each.token_ids
            await asyncio.sleep(0.02)
        assert (text, ids) == expected[:2]
        stream.close()
        await until_idle(llm)

    async def test_the_engine_dies_or_is_closed_meanwhile(self, make: Make) -> None:
        for end in ("close", "die"):
            llm = make()
            stream = llm.submit([1, 2], delta(None))
            await until(lambda llm=llm: llm.stats()["generation_tokens"] > 40)
            if end == "die":
                break_down(llm)
                await until(lambda llm=llm: not llm.is_healthy)
            else:
                await llm.close()
            async with asyncio.timeout(PATIENCE):
                _, ids, reason = await collect(stream)
            assert reason == "error"
            assert len(ids) >= 40
            stream.close()
            check_idle(llm.engine.core)


async def anext_text(stream: Any) -> str:
    return str((await anext(stream)).text)


def break_down(llm: AsyncLLM, error: BaseException | None = None) -> None:
    """From now on every forward pass fails."""

    def fail(buffers: Any) -> None:
        llm.engine._steps._failures = 2
        raise error or RuntimeError("the device is gone")

    llm.engine.runner.run = fail  # type: ignore[method-assign]


class TestDeath:
    @pytest.mark.parametrize("error", [RuntimeError("gone"), SystemExit(3), MemoryError()])
    async def test_every_stream_ends_with_an_error_within_a_second(
        self, make: Make, error: BaseException
    ) -> None:
        llm = make(max_num_seqs=2)
        streams = [llm.submit([1, i], delta(None)) for i in range(5)]
        await anext(streams[0])
        assert llm.is_healthy
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        whole_answer = asyncio.create_task(whole(llm, "abc", greedy(50)))
        await asyncio.sleep(0)
        break_down(llm, error)
        async with asyncio.timeout(5):
            ends = await asyncio.gather(*readers)
            last = await whole_answer
        assert {end for _, _, end in ends} == {"error"}
        assert type(error).__name__ in (last.outputs[0].error or "")
        await until(lambda: not llm.is_healthy)
        assert (llm.error or "").startswith(type(error).__name__)
        with pytest.raises(EngineDeadError, match=type(error).__name__):
            llm.submit([1], delta(1))
        with pytest.raises(EngineDeadError, match=type(error).__name__):
            await whole(llm, "abc", greedy(1))
        for stream in streams:
            stream.close()
        check_idle(llm.engine.core)

    async def test_a_failed_step_is_not_the_end(self, make: Make) -> None:
        llm = make()
        original, failures = llm.engine.runner.run, [RuntimeError("once")]

        def run(buffers: Any) -> None:
            if failures:
                raise failures.pop()
            original(buffers)

        llm.engine.runner.run = run  # type: ignore[method-assign]
        first = await whole(llm, "abc", greedy(3))
        assert first.stop_reason == "error"
        assert "RuntimeError: once" in (first.outputs[0].error or "")
        assert llm.is_healthy
        assert (await whole(llm, "abc", greedy(3))).stop_reason == "max_tokens"
        await until_idle(llm)


class TestClose:
    async def test_with_open_streams(self, make: Make) -> None:
        """Readers that wait, that have not read and that never will: none hangs."""
        for _ in range(5):
            llm = make()
            waiting, unread, _forgotten = (llm.submit([1, i], delta(None)) for i in range(3))
            reader = asyncio.create_task(collect(waiting))
            await until(lambda llm=llm: llm.stats()["generation_tokens"] > 5)
            async with asyncio.timeout(PATIENCE):
                await llm.close()
                assert (await reader)[2] == "error"
                assert (await collect(unread))[2] == "error"
            assert not llm.is_healthy
            assert llm.error is None
            with pytest.raises(EngineDeadError, match="closed"):
                llm.submit([1], delta(1))
            check_idle(llm.engine.core)

    async def test_twice_at_once_and_unused(self, make: Make) -> None:
        llm = make()
        await asyncio.gather(llm.close(), llm.close())
        await llm.close()
        async with make() as other:
            assert other.is_healthy
        assert not other.is_healthy


def test_one_event_loop_after_another(tiny_model: Path) -> None:
    llm = AsyncLLM(EngineArgs(model=str(tiny_model), **SIZES))

    async def generate() -> list[int]:
        return list((await whole(llm, "abc", greedy(10))).token_ids)

    async def leave_one_open() -> Any:
        stream = llm.submit([1, 2], delta(None))
        await anext(stream)
        return stream

    first = asyncio.run(generate())
    left = asyncio.run(leave_one_open())
    assert asyncio.run(generate()) == first

    async def end() -> None:
        # What came while no loop ran is there for the next one to read.
        assert await collect(left)
        left.close()
        await until_idle(llm)
        await llm.close()

    asyncio.run(end())


async def test_idle_costs_nothing(make: Make) -> None:
    llm = make()
    await whole(llm, "abc", greedy(3))
    await until_idle(llm)
    gc.collect()
    # The least of three: other threads of this process, a test's plugin say, may have work.
    spent = []
    for _ in range(3):
        before = time.process_time()
        await asyncio.sleep(1.0)
        spent.append(time.process_time() - before)
    assert min(spent) < 0.02


async def test_a_storm_leaves_nothing(make: Make) -> None:
    """Two hundred requests that are read, left, cancelled or dropped at random moments."""
    llm = make(num_kv_blocks=40, max_model_len=96, max_num_seqs=6, max_num_batched_tokens=24)
    generator = random.Random(5)

    async def client(number: int) -> None:
        await asyncio.sleep(generator.random() * 0.5)
        prompt = [generator.randrange(256) for _ in range(generator.randrange(1, 50))]
        params = SamplingParams(
            n=generator.choice([1, 1, 1, 3]),
            max_tokens=generator.randrange(1, 40),
            seed=number,
            stop=generator.choice([None, "a", "e"]),
            output_kind=generator.choice(list(RequestOutputKind)),
        )
        stream = llm.submit(prompt, params, tenant=str(number % 3), priority=number % 2)
        patience = generator.choice([0, 1, 5, 1000, 1000])
        try:
            async for _ in stream:
                patience -= 1
                if patience < 0:
                    break
                if number % 7 == 0:
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            # The error's traceback would hold the stream for as long as somebody holds the task.
            stream.close()
            raise
        if number % 4 == 0:
            stream.cancel()
        elif number % 4 == 1:
            stream.close()
        del stream

    tasks = [asyncio.create_task(client(number)) for number in range(200)]
    for task in generator.sample(tasks, 60):
        await asyncio.sleep(0.01)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [
        each
        for each in results
        if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError)
    ]
    assert not failed
    gc.collect()
    await until_idle(llm)
    stats = llm.stats()
    ends = ("finished_stop", "finished_length", "finished_abort", "finished_error")
    assert sum(stats[end] for end in ends) == stats["num_requests"] > 100
    assert stats["finished_error"] == 0


async def test_text_of_the_built_in_model(builtin_gguf: Path) -> None:
    """Deltas, whole answer and the tokenizer agree on text in many scripts."""
    args = EngineArgs(model=str(builtin_gguf), num_kv_blocks=128, max_model_len=256)
    async with await asyncio.to_thread(AsyncLLM.from_args, args) as llm:
        decode = llm.tokenizer.decode

        async def check(prompt: str, seed: int) -> None:
            # Hot enough for every script and for characters cut in the middle.
            params = SamplingParams(
                temperature=3.0,
                seed=seed,
                max_tokens=24,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            pieces, ids = [], []
            async for output in llm.generate(prompt, params):
                pieces.append(output.text)
                ids += output.token_ids
            assert "".join(pieces) == decode(ids)

        prompts = ("Repeat: 😀👩‍👧", "今天天气很好", "Hello", "שלום", "ďábel")
        await asyncio.gather(*(check(p, seed) for p in prompts for seed in range(3)))
        await until_idle(llm)


EXIT_WITHOUT_CLOSE = """
import asyncio, sys
from miniinfer import AsyncLLM, EngineArgs, SamplingParams

async def main():
    global llm, streams
    llm = AsyncLLM(EngineArgs(model=sys.argv[1], max_model_len=200))
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    streams = [llm.submit([number + 1], params) for number in range(20)]
    await anext(streams[0])

asyncio.run(main())
sys.exit(7)
"""


def test_the_interpreter_ends_in_the_midst_of_a_step(tiny_model: Path) -> None:
    package = Path(miniinfer.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", EXIT_WITHOUT_CLOSE, str(tiny_model)]
    children = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for child in children:
        _, errors = child.communicate(timeout=4 * PATIENCE)
        assert (child.returncode, errors) == (7, "")
