"""Generation with the engine in a process of its own: what it gives, and every way to lose it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import miniinfer
from engines import SIZES, collect, greedy, make_llm, whole
from miniinfer import EngineArgs, EngineDeadError, ParameterError, RequestOutputKind, SamplingParams
from miniinfer.remote_llm import RemoteLLM, _stats_of, add_up

PATIENCE = 60.0
"""Seconds after which a wait is a hang, on however slow a machine."""


def start(model: Path, **options: Any) -> RemoteLLM:
    sizes = options.pop("sizes", {})
    return RemoteLLM.from_args(
        EngineArgs(model=str(model), threads=1, **(SIZES | sizes)), **options
    )


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[RemoteLLM]:
    """An engine that tests leave as they found it."""
    llm = start(tiny_model)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
def own(tiny_model: Path) -> Iterator[Callable[..., RemoteLLM]]:
    """Engines for tests that end them."""
    made: list[RemoteLLM] = []

    def make(**options: Any) -> RemoteLLM:
        made.append(start(tiny_model, **options))
        return made[-1]

    yield make
    for llm in made:
        asyncio.run(llm.close())


def delta(max_tokens: int | None, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, output_kind=RequestOutputKind.DELTA, **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def requests_so_far(llm: RemoteLLM) -> int:
    """Requests that the engine has taken in; what it says of itself comes a little later."""
    await until_idle(llm)
    count = -1
    while count != llm.stats()["num_requests"]:
        count = llm.stats()["num_requests"]
        await asyncio.sleep(0.5)
    return count


async def until_idle(llm: RemoteLLM) -> None:
    """Every request is gone, every block free, and the engine's state is sound."""

    def idle() -> bool:
        stats = llm.stats()
        live = [stats[name] for name in stats if name.startswith("num_requests_")]
        ended = sum(stats[f"finished_{reason}"] for reason in ("stop", "length", "abort", "error"))
        return not any(live) and stats["kv_blocks_used"] == 0 and ended == stats["num_requests"]

    await until(idle)
    await llm.check()
    assert not llm._by_choice
    assert not llm._ids
    assert not llm._loads
    assert all(link.outstanding == 0 for link in llm._links)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestGenerate:
    async def test_is_what_an_engine_beside_gives(
        self, shared: RemoteLLM, tiny_model: Path
    ) -> None:
        prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(12)]
        params = greedy(15, logprobs=3)
        llm = make_llm(tiny_model)
        expected = llm.generate(prompts, params)
        outputs = await asyncio.gather(*(whole(shared, prompt, params) for prompt in prompts))
        for output, reference in zip(outputs, expected, strict=True):
            assert output.text == reference.text
            assert output.token_ids == reference.token_ids
            assert [
                sorted((token, round(entry.logprob, 4)) for token, entry in position.items())
                for position in output.outputs[0].logprobs
            ] == [
                sorted((token, round(entry.logprob, 4)) for token, entry in position.items())
                for position in reference.outputs[0].logprobs or ()
            ]
        await until_idle(shared)

    async def test_deltas_choices_and_stops(self, shared: RemoteLLM) -> None:
        decode = shared.tokenizer.decode
        text, ids = "", []
        async for output in shared.generate("日本語 😀", delta(60)):
            text += output.text
            ids += output.token_ids
        assert text == decode(ids)
        assert (await whole(shared, "日本語 😀", greedy(60))).text == text
        params = SamplingParams(n=5, seed=3, max_tokens=9, ignore_eos=True)
        several = await whole(shared, "abc", params)
        assert [choice.index for choice in several.outputs] == [0, 1, 2, 3, 4]
        assert len({tuple(choice.token_ids) for choice in several.outputs}) == 5
        stop = next(character for character in text[5:] if character != "�")
        stopped = await whole(shared, "日本語 😀", greedy(60, stop=[stop]))
        assert stopped.text == text[: text.index(stop)]
        assert stopped.outputs[0].stop_reason == stop
        await until_idle(shared)

    async def test_what_is_refused_never_leaves(self, shared: RemoteLLM) -> None:
        before = await requests_so_far(shared)
        for prompt, params in (
            ("", greedy(4)),
            ([1, -1], greedy(4)),
            ([999], greedy(4)),
            ("x" * 127, greedy(4)),
            ("x", greedy(4, stop_token_ids=[999])),
        ):
            with pytest.raises(ValueError, match=r"prompt|token"):
                await whole(shared, prompt, params, request_id="mine")
        stream = shared.submit([1, 2], delta(50), request_id="mine")
        with pytest.raises(ParameterError, match="'mine' is already in use"):
            shared.submit([3], delta(5), request_id="mine")
        assert len((await collect(stream))[1]) == 50
        stream.close()
        assert await requests_so_far(shared) == before + 1

    async def test_a_storm_of_cancels_leaves_nothing(self, shared: RemoteLLM) -> None:
        for round_ in range(12):
            streams = [shared.submit([1 + i, round_], delta(None, n=1 + i % 3)) for i in range(12)]
            await anext(streams[0])
            for i, stream in enumerate(streams):
                if i % 3 == 0:
                    stream.close()
                elif i % 3 == 1:
                    stream.cancel()
            for stream in streams[1::3]:
                ends = [each.finish_reason async for each in stream if each.finish_reason]
                assert set(ends) <= {"abort", "length"}
            del streams, stream
            gc.collect()
        await until_idle(shared)

    async def test_a_reader_that_sleeps_gets_it_all_later(self, shared: RemoteLLM) -> None:
        expected = await collect(shared.submit([1, 2], delta(100)))
        # The counters come after the deltas, and those before them may look as idle.
        await requests_so_far(shared)
        ended = shared.stats()["finished_length"]
        stream = shared.submit([1, 2], delta(100))
        await until(lambda: shared.stats()["finished_length"] > ended)
        pieces = [each async for each in stream]
        assert len(pieces) < 20
        assert "".join(each.text for each in pieces) == expected[0]
        assert [token for each in pieces for token in each.token_ids] == expected[1]
        stream.close()
        await until_idle(shared)

    async def test_the_prefix_cache_can_be_reset(self, shared: RemoteLLM) -> None:
        await whole(shared, "a prompt of several blocks", greedy(3))
        await until(lambda: shared.stats()["kv_blocks_cached"] > 0)
        assert shared.reset_prefix_cache()
        await until(lambda: shared.stats()["kv_blocks_cached"] == 0)
        await until_idle(shared)


IDLE = """
import asyncio, sys, time
from pathlib import Path
from miniinfer import EngineArgs, SamplingParams
from miniinfer.remote_llm import RemoteLLM

def switches(process):
    "How often its threads went to sleep."
    found = 0
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        found += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt"))
    return found

async def main():
    args = EngineArgs(model=sys.argv[1], max_model_len=128, num_kv_blocks=64, threads=1)
    llm = await asyncio.to_thread(RemoteLLM, args)
    async for output in llm.generate("abc", SamplingParams(max_tokens=20, ignore_eos=True)):
        pass
    while llm.stats()["num_requests_running"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    before = switches(llm.engine_pid), switches("self")
    ticks = time.process_time()
    time.sleep(5)
    spent = time.process_time() - ticks
    print(spent, switches(llm.engine_pid) - before[0], switches("self") - before[1])
    await llm.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nobody_wakes_up_while_there_is_nothing_to_do(tiny_model: Path) -> None:
    # In a process of its own: what other tests started in this one may have work.
    command = [sys.executable, "-c", IDLE, str(tiny_model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    spent, engine, ours = map(float, done.stdout.split())
    assert spent < 0.02
    # Our own thread went to sleep once, and read these files.
    assert engine == 0
    assert ours < 4


def test_an_engine_that_is_gone_holds_nothing_any_more() -> None:
    said = {"num_requests_running": 3, "kv_blocks_used": 5, "num_requests": 7, "num_steps": 9}
    link: Any = SimpleNamespace(frontend=SimpleNamespace(stats=said.copy), is_ready=True)
    assert _stats_of(link) == said
    link.is_ready = False
    assert _stats_of(link) == {**said, "num_requests_running": 0, "kv_blocks_used": 0}


class TestDeath:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    async def test_of_the_engine_ends_every_stream(
        self, own: Callable[..., RemoteLLM], number: signal.Signals
    ) -> None:
        llm = own(sizes={"max_num_seqs": 2})
        streams = [llm.submit([1, i], delta(None)) for i in range(5)]
        await anext(streams[0])
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        answer = asyncio.create_task(whole(llm, "abc", greedy(100)))
        await asyncio.sleep(0)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, number)
        async with asyncio.timeout(PATIENCE):
            ends = await asyncio.gather(*readers)
            last = await answer
        assert {end for _, _, end in ends} == {"error"}
        assert number.name in (last.outputs[0].error or "")
        assert not llm.is_healthy
        assert number.name in (llm.error or "")
        with pytest.raises(EngineDeadError, match=number.name):
            llm.submit([1], delta(1))
        for stream in streams:
            stream.close()
        assert not llm._by_choice

    async def test_is_seen_by_one_who_only_asks(self, own: Callable[..., RemoteLLM]) -> None:
        llm = own()
        assert llm.is_healthy
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: not llm.is_healthy)

    async def test_another_engine_takes_its_place(self, own: Callable[..., RemoteLLM]) -> None:
        llm = own(restart=True)
        expected = await whole(llm, "abc", greedy(20))
        first = llm.engine_pid
        assert first is not None
        stream = llm.submit([1, 2], delta(None))
        await anext(stream)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            assert (await collect(stream))[2] == "error"
        stream.close()
        await until(lambda: llm.is_healthy)
        assert llm.engine_pid != first
        assert (await whole(llm, "abc", greedy(20))).token_ids == expected.token_ids
        await llm.check()

    async def test_one_that_hangs_is_given_up(self, own: Callable[..., RemoteLLM]) -> None:
        llm = own(hang_timeout=0.3)
        stream = llm.submit([1, 2], delta(None))
        await anext(stream)
        pid = llm.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            last = [each async for each in stream][-1]
        assert last.finish_reason == "error"
        assert "no sign of life" in (last.error or "")
        assert not llm.is_healthy
        await until(lambda: not is_running(pid))
        stream.close()

    async def test_another_takes_the_place_of_one_that_hangs(
        self, own: Callable[..., RemoteLLM]
    ) -> None:
        llm = own(restart=True, hang_timeout=1.0)
        expected = await whole(llm, "abc", greedy(20))
        pid = llm.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            lost = await whole(llm, "abc", greedy(20))
        assert "no sign of life" in (lost.outputs[0].error or "")
        await until(lambda: not is_running(pid))
        await until(lambda: llm.is_healthy)
        assert llm.engine_pid != pid
        assert (await whole(llm, "abc", greedy(20))).token_ids == expected.token_ids

    async def test_another_takes_the_place_of_one_whose_step_hangs(
        self, own: Callable[..., RemoteLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It answers every question meanwhile: only its own watchdog notices."""
        hang = tmp_path / "hang"
        monkeypatch.setenv("HANG_WHILE", str(hang))
        path = (str(Path(__file__).parent), str(Path(miniinfer.__file__).parents[1]))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        llm = own(restart=True, engine_module="hanging_engine", sizes={"step_timeout": 3.0})
        expected = await whole(llm, "abc", greedy(20))
        pid = llm.engine_pid
        assert pid is not None
        hang.touch()
        async with asyncio.timeout(PATIENCE):
            lost = await whole(llm, "abc", greedy(20))
        assert "more than 3 s (step_timeout)" in (lost.outputs[0].error or "")
        hang.unlink()
        await until(lambda: not is_running(pid))
        await until(lambda: llm.is_healthy)
        assert (await whole(llm, "abc", greedy(20))).token_ids == expected.token_ids

    async def test_one_that_cannot_load_says_why(self, tiny_model: Path, tmp_path: Path) -> None:
        args = EngineArgs(model=str(tiny_model), max_model_len=10_000)
        with pytest.raises(EngineDeadError, match="max_model_len must be at most 256"):
            await asyncio.to_thread(RemoteLLM, args)
        with pytest.raises(ValueError, match=r"nothing|not|no "):
            await asyncio.to_thread(RemoteLLM, EngineArgs(model=str(tmp_path / "nothing")))

    async def test_closing_ends_streams_and_the_process(
        self, own: Callable[..., RemoteLLM]
    ) -> None:
        llm = own()
        pid = llm.engine_pid
        assert pid is not None
        assert llm._own_folder is not None
        folder = llm._own_folder.path
        # So many that the last of them are far from their ends.
        *_others, waiting, unread = [llm.submit([1, i], delta(None)) for i in range(100)]
        reader = asyncio.create_task(collect(waiting))
        await until(lambda: llm.stats()["generation_tokens"] > 5)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(llm.close(), llm.close())
            assert (await reader)[2] == "error"
            assert (await collect(unread))[2] == "error"
        assert not is_running(pid)
        assert not folder.exists()
        assert not llm.is_healthy
        assert llm.error is None
        with pytest.raises(EngineDeadError, match="closed"):
            llm.submit([1], delta(1))


PARENT = """
import asyncio, sys
from miniinfer import EngineArgs, SamplingParams
from miniinfer.remote_llm import RemoteLLM

async def main():
    args = EngineArgs(model=sys.argv[1], max_model_len=128, num_kv_blocks=64)
    llm = await asyncio.to_thread(RemoteLLM, args)
    assert "torch" not in sys.modules
    stream = llm.submit([1, 2], SamplingParams(ignore_eos=True, n=20))
    await anext(stream)
    print(llm.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
async def test_no_engine_outlives_its_parent(tiny_model: Path, stopped: bool) -> None:
    """Not even one that cannot look for itself."""
    package = Path(miniinfer.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT, str(tiny_model)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert is_running(pid)
        if stopped and sys.platform == "linux":
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    await until(lambda: not is_running(pid))


def test_counters_add_up() -> None:
    one = {"num_steps": 3, "time": ((0.1, 1.0), [1, 2, 3], 4.5)}
    two = {"num_steps": 4, "time": ((0.1, 1.0), [1, 0, 1], 0.5)}
    assert add_up([one, two]) == {"num_steps": 7, "time": ((0.1, 1.0), [2, 2, 4], 5.0)}
    assert add_up([one]) == one
    assert add_up([]) == {}
