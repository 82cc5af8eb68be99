"""A model over several processes: the same tokens as in one, and an end when any of them ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

import tiny
from engines import collect, greedy, make_llm, whole
from miniinfer import AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from miniinfer.model import load_model
from miniinfer.model.config import ModelConfig
from miniinfer.parallel.communicator import Communicator
from miniinfer.parallel.errors import ParallelError
from miniinfer.parallel.launch import join_store, serve_store
from miniinfer.parallel.members import SpawnedMember, accept_members, call_leader
from miniinfer.parallel.plan import PlanPacker, PlanReader
from miniinfer.parallel.shard import Shard, check_size
from miniinfer.parallel.torchrun import Torchrun, torchrun
from miniinfer.step import StepHeader, StepInputs
from model_helpers import PagedRunner, random_tokens, save, tiny_model, write_gguf

PATIENCE = 60.0
"""Far longer than anything here takes, and than the processes give each other at their end."""

CPU = torch.device("cpu")


def ranks(size: int, work: Callable[[Communicator, int], Any]) -> list[Any]:
    """What `work` returns in each rank; all are threads of this process."""
    store = distributed.HashStore()

    def run(rank: int) -> Any:
        return work(Communicator(store, rank, size, CPU, "127.0.0.1"), rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def sharded_logits(folder: Path, size: int, tokens: list[int], chunks: list[int]) -> Tensor:
    """Rank 0's logits of a sequence computed in chunks by `size` ranks."""

    def work(communicator: Communicator, rank: int) -> Tensor:
        model = load_model(folder, progress=False, shard=Shard(rank, size))
        model.communicator = communicator
        return PagedRunner(model).run(tokens, chunks)

    return ranks(size, work)[0]


class TestOneModel:
    """In parts it computes what it does as a whole."""

    @pytest.mark.parametrize(
        ("family", "size", "settings"),
        [
            ("llama", 2, {}),
            ("llama", 2, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
            ("mistral", 3, {"num_key_value_heads": 3, "sliding_window": 7}),
            ("qwen2", 2, {"tie_word_embeddings": True}),
            ("qwen2", 6, {}),
            ("qwen3", 2, {"head_dim": 16}),
            ("qwen3", 6, {"num_key_value_heads": 3}),
        ],
    )
    def test_of_every_family(
        self, tmp_path: Path, family: str, size: int, settings: dict[str, Any]
    ) -> None:
        # The vocabulary of 97 divides by none of the sizes.
        folder = save(tiny_model(family, intermediate_size=96, **settings), tmp_path)
        tokens, chunks = random_tokens(40), [11, 1, 17, 1]
        expected = PagedRunner(load_model(folder, progress=False)).run(tokens, chunks)
        found = sharded_logits(folder, size, tokens, chunks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (found.argmax(-1) == expected.argmax(-1)).all()

    @pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
    @pytest.mark.parametrize("architecture", ["llama", "qwen2"])
    def test_of_a_gguf_file(self, tmp_path: Path, architecture: str, kind: str) -> None:
        # The output projection's 96 columns are cut in the middle of a block of 32; the rows of the
        # llama architecture are stored for another rotation.
        model = tiny_model(
            architecture,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            head_dim=24,
        )
        file = write_gguf(tmp_path / "model.gguf", model, architecture, kind)
        tokens = random_tokens(20)
        expected = PagedRunner(load_model(file, progress=False)).run(tokens, [7])
        found = sharded_logits(file, 2, tokens, [7])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_is_split_and_not_copied(self, tmp_path: Path) -> None:
        folder = save(tiny_model("llama", intermediate_size=96), tmp_path)
        whole = load_model(folder, progress=False)
        parts = [load_model(folder, progress=False, shard=Shard(rank, 2)) for rank in range(2)]
        for name in ("qkv", "output", "gate_up", "down"):
            sizes = [getattr(part.layers[0], name).numel() for part in parts]
            assert sizes == [getattr(whole.layers[0], name).numel() // 2] * 2
        assert [len(part.lm_head) for part in parts] == [49, 48]
        assert parts[0].config.num_kv_heads == 1
        # Without the other one: as much work and as many logits, but not the model's.
        alone = PagedRunner(parts[0]).run(random_tokens(9), [4])
        assert alone.shape == PagedRunner(whole).run(random_tokens(9), [4]).shape


def config(heads: int, kv_heads: int, inner: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=inner,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        vocab_size=10,
        max_position_embeddings=32,
        sliding_windows=(None,),
    )


class TestSizes:
    @pytest.mark.parametrize(
        ("size", "message"),
        [
            (3, "divide the model's 8 attention heads, got 3: 1, 2 or 4 would do"),
            (
                8,
                "divide the model's 100 columns of the MLP (intermediate_size), got 8: "
                "1, 2 or 4 would do",
            ),
            (
                4,
                "divide the model's 6 key-value heads or be a multiple of them, got 4: "
                "1 or 2 would do",
            ),
        ],
    )
    def test_that_do_not_fit_the_model(self, size: int, message: str) -> None:
        kv_heads = 6 if size == 4 else 2
        message = re.escape(f"tensor_parallel_size must {message}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            check_size(config(8, kv_heads, 100), size)

    def test_of_a_model_that_is_had_in_one_piece_alone(self) -> None:
        with pytest.raises(ValueError, match=r"9 attention heads, got 2: only 1 would do$"):
            check_size(config(9, 9, 100), 2)

    def test_with_more_parts_than_tokens(self) -> None:
        rows = [Shard(rank, 8).vocabulary(10) for rank in range(8)]
        assert [row.stop - row.start for row in rows] == [2, 2, 2, 2, 2, 0, 0, 0]

    @pytest.mark.parametrize("value", [0, -1, 1025, True, "2"])
    def test_that_no_engine_takes(self, value: Any) -> None:
        with pytest.raises(ValueError, match="tensor_parallel_size must be"):
            EngineArgs(tensor_parallel_size=value)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("quantization", "int8"),
            ("attention_backend", "cpu"),
            ("kv_cache_dtype", "int8"),
            ("dtype", "bfloat16"),
        ],
    )
    def test_beside_settings_for_the_kernels(
        self, tiny_model: Path, setting: str, value: str
    ) -> None:
        with pytest.raises(ValueError, match=f"{setting} must be one of auto.* got {value}"):
            make_llm(tiny_model, tensor_parallel_size=2, device="cpu", **{setting: value})

    def test_beside_a_single_device(self, tiny_model: Path) -> None:
        with pytest.raises(ValueError, match=r"device must be auto, cpu or cuda .* got 'cuda:1'"):
            make_llm(tiny_model, tensor_parallel_size=2, device="cuda:1")

    def test_beyond_the_devices_of_a_machine(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        message = "^tensor_parallel_size must be at most the number of CUDA .* 1, got 2"
        with pytest.raises(ValueError, match=message):
            make_llm(tiny_model, tensor_parallel_size=2, device="cuda")


VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


class TestTorchrun:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in VARIABLES.items():
            monkeypatch.setenv(name, value)
        return monkeypatch

    def test_is_found_in_the_environment(self, launched: pytest.MonkeyPatch) -> None:
        assert torchrun() == Torchrun(1, 4, 1, 4, "here")
        launched.setenv("LOCAL_WORLD_SIZE", "2")
        assert torchrun() == Torchrun(1, 4, 1, 2, "here")
        launched.setenv("WORLD_SIZE", "1")
        assert torchrun() is None
        launched.delenv("RANK")
        assert torchrun() is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("RANK", "4"),
            ("RANK", "x"),
            ("WORLD_SIZE", "0"),
            ("LOCAL_WORLD_SIZE", "5"),
            ("LOCAL_RANK", "4"),
            ("MASTER_PORT", "x"),
            ("MASTER_PORT", "65536"),
        ],
    )
    def test_has_to_make_sense(self, launched: pytest.MonkeyPatch, name: str, value: str) -> None:
        launched.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} must be an integer from .* got '{value}'"):
            torchrun()

    def test_has_to_be_whole(self, launched: pytest.MonkeyPatch) -> None:
        launched.delenv("MASTER_PORT")
        with pytest.raises(ValueError, match="WORLD_SIZE of 4, and lacks MASTER_PORT: "):
            torchrun()
        launched.delenv("MASTER_ADDR")
        with pytest.raises(ValueError, match="and lacks MASTER_ADDR and MASTER_PORT: "):
            torchrun()
        launched.setenv("WORLD_SIZE", "1")
        assert torchrun() is None

    def test_has_to_start_as_many_as_asked_for(
        self, launched: pytest.MonkeyPatch, tiny_model: Path
    ) -> None:
        with pytest.raises(ValueError, match=r"launched \(WORLD_SIZE\), 4, got 2"):
            make_llm(tiny_model, tensor_parallel_size=2)

    def test_says_which_device_rank_0_has(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from miniinfer.parallel import leader as leaders

        asked = []

        def rank_device(args: EngineArgs, local_rank: int, local_size: int) -> torch.device:
            asked.append((local_rank, local_size))
            raise ValueError("enough is known")

        monkeypatch.setattr(leaders, "rank_device", rank_device)
        args = EngineArgs(model=str(tiny_model), tensor_parallel_size=4)
        for launch in (Torchrun(0, 4, 1, 2, "here"), None):
            with pytest.raises(ValueError, match="enough is known"):
                leaders.Leader(args, tiny_model, launch)
        assert asked == [(1, 2), (0, 4)]


class TestMessages:
    @pytest.mark.parametrize("count", [0, 1, 4095, 4096, 10_001])
    def test_arrive_whatever_their_length(self, count: int) -> None:
        words = np.arange(count, dtype=np.int32)

        def work(communicator: Communicator, rank: int) -> list[int]:
            found = []
            for _ in range(2):
                if rank == 0:
                    communicator.send(words)
                else:
                    found.append(communicator.receive().tolist())
            return found

        assert ranks(2, work)[1] == [words.tolist()] * 2

    def test_least_and_gathered(self) -> None:
        def work(communicator: Communicator, rank: int) -> Any:
            parts = communicator.gather(torch.tensor([rank]))
            return communicator.least(7 - rank), parts and [int(part) for part in parts]

        assert ranks(3, work) == [(5, [0, 1, 2]), (5, None), (5, None)]

    def test_of_plans_hold_what_changed_of_the_table(self) -> None:
        table = np.full((4, 6), -7, np.int32)
        packer, reader = PlanPacker((4, 6), 4), PlanReader((4, 6), CPU)

        def exchange(rows: list[int], lengths: list[int]) -> tuple[Any, int]:
            tokens = len(rows) + 3
            header = StepHeader(tokens, len(rows), 1, 2, 4, max(lengths), 0, 0, 0, 5, 0, 0, 0)
            inputs = StepInputs(
                token_ids=np.arange(tokens, dtype=np.int32),
                positions=np.arange(tokens, dtype=np.int32) + 100,
                slot_mapping=np.arange(tokens, dtype=np.int64) + 2**40,
                query_start=np.arange(len(rows) + 1, dtype=np.int32),
                seq_lens=np.array(lengths, np.int32),
                rows=np.array(rows, np.int32),
                block_table=table,
                logits_index=np.array([1, 2], np.int32),
            )
            words = packer.pack(header, inputs)
            plan = reader.read(words)
            for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens"):
                assert getattr(plan.batch, name).tolist() == getattr(inputs, name).tolist()
            assert plan.batch.rows.tolist() == rows
            assert plan.batch.logits_index.tolist() == [1, 2]
            assert plan.batch.slot_mapping.dtype is torch.int64
            batch = plan.batch
            assert (batch.num_decodes, batch.max_query_len, plan.num_samples) == (1, 4, 2)
            assert (batch.max_seq_len, plan.num_prompt_rows) == (max(lengths), 5)
            return plan, len(words)

        table[2, :3], table[0, :2] = (5, 6, 7), (8, 9)
        plan, first = exchange([2, 0], [9, 6])
        assert plan.batch.block_table[2, :3].tolist() == [5, 6, 7]
        assert plan.batch.block_table[0, :2].tolist() == [8, 9]
        plan, second = exchange([2, 0], [10, 7])
        assert first - second == 2 * 6, "six entries of the table, each with its place"
        table[0] = (1, 2, 3, 4, 5, 6)
        plan, _ = exchange([0], [24])
        assert plan.batch.block_table[0].tolist() == [1, 2, 3, 4, 5, 6]
        assert plan.batch.block_table[2, :3].tolist() == [5, 6, 7]


class TestLines:
    def test_of_strangers_are_not_taken(self) -> None:
        store, port = serve_store(2)
        launch = Torchrun(1, 2, 1, 2, "127.0.0.1")
        found: list[Any] = []
        leader = threading.Thread(target=lambda: found.extend(accept_members(launch, store)))
        leader.start()
        # One client of a store cannot set a note while it waits for it.
        others = join_store(port, 2)
        address = ("127.0.0.1", int(others.get("link").decode().split()[0]))
        for said in (b"\n", b"GET / HTTP/1.1\n", b'{"secret": "x", "rank": 1}\n', b"[]\n"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(said)
                assert stranger.recv(1) == b"", "it is left"
        lines = call_leader(launch, others)
        leader.join()
        [member] = found
        assert member.rank == 1
        lines.write({"error": "words"})
        assert member.lines.read() == [{"error": "words"}]
        lines.socket.close()
        assert member.lines.read() is None
        member.close(1.0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


SIZES: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch",
    "threads": 1,
    "max_num_batched_tokens": 24,
    "num_kv_blocks": 40,
    "block_size": 4,
    "max_model_len": 128,
}


class TestProcesses:
    def test_give_the_tokens_of_one(self, tiny_model: Path) -> None:
        prompts = [{"prompt_token_ids": random_tokens(n, seed=n)} for n in (70, 1, 30, 55)]
        params = greedy(50, logprobs=2, prompt_logprobs=3)
        with make_llm(tiny_model, **SIZES) as llm:
            expected = llm.generate(prompts, params)
        with make_llm(tiny_model, tensor_parallel_size=2, **SIZES) as llm:
            outputs = llm.generate(prompts, params)
            assert llm.get_metrics()["num_preemptions"] > 0
            leader = llm.llm_engine.engine.leader
            [pid] = [member.pid for member in leader.members]
            assert is_running(pid)
            seeded = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
            drawn = llm.generate(prompts[0], seeded)[0]
            again = llm.generate(prompts[0], seeded)[0]
        assert not is_running(pid), "closing ends it"
        ours = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "gloo_tcp_loop" not in ours, "which never rests"
        assert drawn.token_ids == again.token_ids
        for one, other in zip(expected, outputs, strict=True):
            assert one.token_ids == other.token_ids
            ours, theirs = (
                [entry[token].logprob for entry, token in zip(found, ids, strict=True)]
                for found, ids in (
                    (output.outputs[0].logprobs, output.token_ids) for output in (one, other)
                )
            )
            assert ours == pytest.approx(theirs, abs=1e-3)
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
            for mine, its in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
                assert {i: e.logprob for i, e in mine.items()} == pytest.approx(
                    {i: e.logprob for i, e in its.items()}, abs=1e-3
                )

    def test_draft_as_one_does(self, tiny_model: Path) -> None:
        # Bytes that repeat themselves. Small steps and few blocks cut prompts, and preempt.
        generator = torch.Generator().manual_seed(3)
        pieces = [torch.randint(0, 256, (n,), generator=generator) for n in (1, 3, 7, 11, 16)]
        prompts = [{"prompt_token_ids": piece.tolist() * 3} for piece in pieces]
        params = [*[greedy(60, logprobs=1)] * 4, SamplingParams(max_tokens=40, seed=5)]
        drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
        with make_llm(tiny_model, **SIZES) as llm:
            expected = llm.generate(prompts, params)
        with make_llm(
            tiny_model, tensor_parallel_size=2, speculative_config=drafts, **SIZES
        ) as llm:
            outputs = llm.generate(prompts, params)
            stats = llm.get_metrics()
        assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
        assert stats["spec_decode_num_draft_tokens"] > stats["spec_decode_num_accepted_tokens"] > 0
        assert stats["num_preemptions"] > 0

    @pytest.mark.parametrize("moment", ["busy", "idle"])
    async def test_end_the_engine_when_one_is_killed(self, tmp_path: Path, moment: str) -> None:
        folder = tiny.write_tiny_llama(tmp_path / "m", num_key_value_heads=1)
        args = EngineArgs(model=str(folder), tensor_parallel_size=2, **SIZES)
        llm = await asyncio.to_thread(AsyncLLM, args)
        async with llm:
            answer = await whole(llm, "abc", greedy(5))
            assert len(answer.token_ids) == 5
            [member] = llm.engine.leader.members
            if moment == "busy":
                stream = llm.submit([1, 2], greedy(100))
                await anext(stream)
                os.kill(member.pid, signal.SIGKILL)
                async with asyncio.timeout(PATIENCE):
                    assert (await collect(stream))[2] == "error"
                stream.close()
            else:
                os.kill(member.pid, signal.SIGKILL)
            await until(lambda: not llm.is_healthy)
            assert "rank 1 was killed by SIGKILL" in (llm.error or "")
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                llm.submit([1], greedy(1))

    @pytest.mark.parametrize("moment", ["starting", "loading"])
    def test_say_when_one_is_killed_before_it_is_ready(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        from miniinfer.parallel import leader as leaders

        class Killed(SpawnedMember):
            def __init__(self, rank: int, message: dict[str, Any]) -> None:
                super().__init__(rank, message)
                os.kill(self.pid, signal.SIGKILL)

        if moment == "starting":
            monkeypatch.setattr(leaders, "SpawnedMember", Killed)
        share_memory = leaders.Leader.share_memory

        def kill_first(leader: leaders.Leader, free: int) -> int:
            os.kill(leader.members[0].pid, signal.SIGKILL)
            return share_memory(leader, free)

        monkeypatch.setattr(leaders.Leader, "share_memory", kill_first)
        with pytest.raises(ParallelError, match="rank 1 was killed by SIGKILL"):
            make_llm(tiny_model, tensor_parallel_size=2, **SIZES)

    def test_say_why_one_cannot_load(self, tiny_model: Path, tmp_path: Path) -> None:
        # Rank 0 is told of a model that is there, the other one of none.
        from miniinfer.parallel.leader import Leader

        args = EngineArgs(model=str(tiny_model), tensor_parallel_size=2, **SIZES)
        leader = Leader(args, tmp_path / "nothing", None)
        try:
            with pytest.raises(ParallelError, match=r"rank 1 has failed: .*nothing"):
                leader.share_memory(1)
            with pytest.raises(ParallelError, match="nothing"):
                leader.check()
        finally:
            leader.close()
