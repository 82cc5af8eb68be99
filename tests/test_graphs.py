"""Decode steps as graphs: padded, captured once for each size, over memory that stays in place."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import check_idle, greedy, make_llm
from fake_device import make_asynchronous
from miniinfer import LLM, SamplingParams
from miniinfer.engine import StepEngine
from miniinfer.execution.graphs import (
    DecodeGraphs,
    GraphLimits,
    context_limits,
    graph_backend,
    graph_sizes,
)
from miniinfer.execution.queue import on_device
from miniinfer.model.batch import ForwardBatch
from tiny import write_tiny_llama


class FakeGraphs:
    """A `GraphBackend` that repeats by calling again, and has one place for what comes of it.

    As with CUDA graphs, what the recorded work returns is overwritten by the next replay.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        place = run().clone()

        def replay() -> Tensor:
            self.replays += 1
            return place.copy_(run())

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Engines that are made capture their decode steps with this."""
    made = FakeGraphs()

    def limits(engine: StepEngine) -> GraphLimits | None:
        if engine.args.enforce_eager:
            return None
        return GraphLimits(engine.args.max_num_seqs, engine.max_model_len)

    monkeypatch.setattr(StepEngine, "_graph_limits", limits)
    monkeypatch.setattr("miniinfer.runner.graph_backend", lambda device, attention: made)
    return made


PROMPTS = [f"{number} is a number" * (1 + number % 3) for number in range(11)]
PARAMS = [
    greedy(5 + number)
    if number % 3
    else SamplingParams(temperature=1.0, seed=number, max_tokens=9, top_p=0.9, logprobs=2)
    for number in range(11)
]


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 5, "max_num_batched_tokens": 21}])
def test_tokens_are_those_of_eager_steps(
    backend: FakeGraphs, folder: Path, overlapped: bool, sizes: dict[str, Any]
) -> None:
    expected = tokens(make_llm(folder, enforce_eager=True, **sizes))
    assert backend.captures == 0
    llm = make_llm(folder, async_scheduling=overlapped, **sizes)
    device = make_asynchronous(llm.llm_engine) if overlapped else None
    assert tokens(llm) == expected
    captured = llm.llm_engine.engine.runner.graphs.captured
    assert backend.captures == len(captured) > 1
    assert backend.replays > backend.captures
    assert {size for size, _ in captured} <= set(graph_sizes(sizes.get("max_num_seqs", 16)))
    # Each is captured once.
    assert tokens(llm) == expected
    assert backend.captures == len(llm.llm_engine.engine.runner.graphs.captured)
    check_idle(llm.llm_engine.engine.core)
    if device is not None:
        device.close()


def test_padding_writes_to_the_scratch_block_alone(backend: FakeGraphs, folder: Path) -> None:
    llm = make_llm(folder, enable_prefix_caching=False)
    cache = llm.llm_engine.engine.runner.cache
    assert cache.keys[0].shape[0] == 257
    for layer in (*cache.keys, *cache.values):
        layer.zero_()
    # Three decodes in a graph of four.
    llm.generate(PROMPTS[:3], greedy(4), use_tqdm=False)
    assert (4, 128) in llm.llm_engine.engine.runner.graphs.captured
    written = cache.keys[0].abs().sum((1, 2, 3)).nonzero().squeeze(1).tolist()
    used = sum(-(-(len(prompt) + 3) // 4) for prompt in PROMPTS[:3])
    assert written[-1] == 256
    assert len(written) == used + 1


class Recorder:
    """Stands for a model: notes where its inputs lie, and what they are when it runs."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, batch: ForwardBatch) -> Tensor:
        tensors = {
            name: getattr(batch, name)
            for name in ForwardBatch.__slots__
            if isinstance(getattr(batch, name), Tensor)
        }
        self.seen.append(
            {"addresses": {name: (each.data_ptr(), each.shape) for name, each in tensors.items()}}
            | {name: each.clone() for name, each in tensors.items()}
            | {"max_seq_len": batch.max_seq_len, "host": batch.seq_lens_host.copy()}
        )
        return batch.token_ids[:, None].float().repeat(1, 2)


def decodes(lengths: list[int], first_token: int = 50) -> ForwardBatch:
    count = len(lengths)
    numbers = torch.arange(count, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return ForwardBatch(
        token_ids=numbers + first_token,
        positions=seq_lens - 1,
        slot_mapping=numbers.long() * 8,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=seq_lens,
        rows=numbers.flip(0),
        block_table=torch.arange(7 * 1024, dtype=torch.int32).view(7, 1024),
        logits_index=numbers,
        num_decodes=count,
        max_query_len=1,
        max_seq_len=max(lengths),
        query_start_host=torch.arange(count + 1, dtype=torch.int32).numpy(),
        seq_lens_host=seq_lens.numpy(),
    )


def make_graphs(forward: Callable[[ForwardBatch], Tensor]) -> DecodeGraphs:
    return DecodeGraphs(
        FakeGraphs(),
        forward,
        GraphLimits(max_num_seqs=7, max_model_len=8192),
        block_size=8,
        scratch_block=99,
        device=torch.device("cpu"),
    )


def test_inputs_keep_their_places_and_what_a_longer_step_left_is_padded_again() -> None:
    recorder = Recorder()
    graphs = make_graphs(recorder)
    assert graphs.run(decodes([5, 6, 7, 8])).tolist() == [[50 + n] * 2 for n in range(4)]
    assert graphs.run(decodes([9, 3, 4], 70)).tolist() == [[70 + n] * 2 for n in range(3)]
    assert graphs.captured == [(4, 1024)]
    first, last = recorder.seen[0], recorder.seen[-1]
    assert first["addresses"] == last["addresses"]
    assert last["token_ids"].tolist() == [70, 71, 72, 0]
    assert last["positions"].tolist() == [8, 2, 3, 0]
    assert last["seq_lens"].tolist() == last["host"].tolist() == [9, 3, 4, 1]
    assert last["slot_mapping"].tolist() == [0, 8, 16, 99 * 8]
    assert last["rows"].tolist() == [2, 1, 0, 7]
    assert last["block_table"][7].unique().tolist() == [99]
    assert last["block_table"][:7].equal(decodes([1]).block_table)
    assert last["query_start"].tolist() == [0, 1, 2, 3, 4]


def test_launches_depend_on_the_rounded_context_alone() -> None:
    recorder = Recorder()
    graphs = make_graphs(recorder)
    for length in (1, 900, 1024, 1025, 8192, 30):
        graphs.run(decodes([length]))
    assert graphs.captured == [(1, 1024), (1, 8192)]
    assert {each["max_seq_len"] for each in recorder.seen} == {1024, 8192}


def test_sizes_and_limits_end_at_the_engines() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(300)[-3:] == [248, 256, 300]
    assert graph_sizes(65536)[-3:] == [384, 448, 512]
    assert context_limits(7) == [7]
    assert context_limits(1024) == [1024]
    assert context_limits(131072) == [1024, 2048, 16384, 131072]
    for size in range(1, 400):
        sizes = graph_sizes(size)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == size


def test_graphs_are_for_devices_and_attentions_that_can_be_captured() -> None:
    class Capturable:
        is_capturable = True

    assert graph_backend(torch.device("cpu"), Capturable()) is None
    assert graph_backend(torch.device("cuda"), object()) is None


def test_graphs_keep_one_place_for_what_all_of_them_return() -> None:
    returned: list[Tensor] = []

    class Kept(FakeGraphs):
        def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            returned.append(run())
            return super().capture(run)

    graphs = make_graphs(Recorder())
    graphs._backend = Kept()
    for count in (1, 3, 6, 2):
        expected = [[50 + n] * 2 for n in range(count)]
        assert graphs.run(decodes([5] * count)).tolist() == expected
    assert graphs.captured == [(1, 1024), (2, 1024), (4, 1024), (7, 1024)]
    assert len({each.untyped_storage().data_ptr() for each in returned}) == 1


@pytest.mark.parametrize("overlapped", [False, True])
def test_without_memory_for_another_graph_steps_go_on(
    backend: FakeGraphs,
    folder: Path,
    overlapped: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture = backend.capture

    def first_alone(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if backend.captures:
            raise torch.OutOfMemoryError("CUDA out of memory\nin detail")
        return capture(run)

    monkeypatch.setattr(backend, "capture", first_alone)
    expected = tokens(make_llm(folder, enforce_eager=True))
    llm = make_llm(folder, async_scheduling=overlapped)
    assert tokens(llm) == expected
    assert backend.captures == 1 < backend.replays
    [warning] = [record.message for record in caplog.records if "captured" in record.message]
    assert "(CUDA out of memory): steps" in warning
    check_idle(llm.llm_engine.engine.core)


def test_every_step_is_launched_on_the_device_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of Triton's launches, none can name a device: they go to the one that is current.
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda:1")
    with on_device(second):
        assert current == [second]
    with on_device(torch.device("cpu")):
        assert current == []
    monkeypatch.setattr("miniinfer.runner.on_device", lambda each: device(each))
    llm = make_llm(folder)
    runner = llm.llm_engine.engine.runner
    forward = runner.model.forward

    def looked_at(batch: ForwardBatch) -> Tensor:
        assert current == [runner.model.device]
        return forward(batch)

    monkeypatch.setattr(runner.model, "forward", looked_at)
    assert len(llm.generate("abc", greedy(3))[0].token_ids) == 3
    assert current == []


def test_prefills_and_drafts_are_not_for_graphs(backend: FakeGraphs, folder: Path) -> None:
    llm = make_llm(folder)
    llm.generate(PROMPTS[:2], greedy(1), use_tqdm=False)
    assert backend.captures == 0
