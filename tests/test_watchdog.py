"""Steps that hang: by themselves, and under the readers of an engine."""

import asyncio
import threading
import time

import pytest

from miniinfer import AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from miniinfer.watchdog import Watchdog


def watched(limit):
    barked = threading.Event()
    return Watchdog(limit, barked.set), barked


def test_it_barks_at_a_step_that_does_not_come_back():
    watchdog, barked = watched(0.05)
    watchdog.begin()
    assert barked.wait(30)
    watchdog.close()


def test_short_steps_and_rest_are_no_reason():
    watchdog, barked = watched(0.5)
    for _ in range(20):
        watchdog.begin()
        time.sleep(0.05)
    watchdog.rest()
    assert not barked.wait(1.0)
    watchdog.begin()
    watchdog.close()
    assert not barked.wait(1.0)


def test_it_ends_when_it_is_closed():
    before = threading.active_count()
    watchdog, _ = watched(3600)
    watchdog.begin()
    watchdog.close()
    while threading.active_count() > before:
        time.sleep(0.005)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "1"])
@pytest.mark.parametrize("name", ["step_timeout", "stall_limit"])
def test_durations_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        EngineArgs(**{name: value})


async def test_a_step_that_hangs_ends_every_request(tiny_model):
    args = EngineArgs(
        model=str(tiny_model), num_kv_blocks=64, max_model_len=64, max_num_seqs=2, step_timeout=0.5
    )
    llm = await asyncio.to_thread(AsyncLLM.from_args, args)
    released = threading.Event()
    run = llm.engine.runner.run

    def hang(buffers):
        released.wait()
        run(buffers)

    llm.engine.runner.run = hang
    greedy = SamplingParams(temperature=0, max_tokens=4)
    try:
        # Two that run and two that wait.
        tasks = [asyncio.create_task(_last(llm, greedy)) for _ in range(4)]
        results = await asyncio.gather(*tasks)
        for output in results:
            assert output.outputs[0].finish_reason == "error"
            assert "0.5 s" in output.outputs[0].error
        assert not llm.is_healthy
        with pytest.raises(EngineDeadError, match="hung"):
            llm.submit([1], greedy)
        # Closing does not wait for what hangs.
        await llm.close()
        assert llm._thread.is_alive()
    finally:
        released.set()
        llm._thread.join()
    assert "hung" in llm.error


async def _last(llm, params):
    return [output async for output in llm.generate("a", params)][-1]
