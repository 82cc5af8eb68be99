"""How many KV blocks an engine gets from the memory there is."""

from pathlib import Path

import pytest
import torch

import tiny
from engines import make_llm
from miniinfer.backends import Backend
from miniinfer.config import EngineArgs
from miniinfer.largest_step import longest_batch, run_largest_step
from miniinfer.memory import DeviceMemory, kv_cache_bytes, num_kv_blocks
from miniinfer.model.kv_cache import KVCacheError, bytes_per_block
from miniinfer.model.loader import load_model

GIB = 2**30
CUDA = torch.device("cuda:0")
# Of Llama-3-8B: 32 layers, 16 tokens, 8 heads of 128, bfloat16.
BLOCK = bytes_per_block(32, 16, 8, 128, torch.bfloat16)


class FakeProbe:
    """A device of these numbers; steps are run."""

    def __init__(self, total: int, free: int = 0, step: int = 0) -> None:
        self.memory = DeviceMemory(total, free, step)
        self.runs = 0

    def total(self) -> int:
        return self.memory.total

    def measure(self, step):
        step()
        self.runs += 1
        return self.memory


def blocks(probe, step=lambda: None, device=CUDA, least_free=None, **settings):
    args = EngineArgs(**({"max_num_seqs": 2**16, "max_num_batched_tokens": 2**16} | settings))
    return num_kv_blocks(args, device, BLOCK, 131_072, step, least_free, probe)


def test_a_gpu_gives_what_weights_and_the_largest_step_leave():
    ran = []
    probe = FakeProbe(80 * GIB, 64 * GIB, 3 * GIB)
    # 0.9 of 80 GiB, less 16 GiB in use and 3 GiB for a step.
    assert blocks(probe, lambda: ran.append(1)) == 53 * GIB // BLOCK
    assert ran == [1]
    assert blocks(probe, gpu_memory_utilization=0.5) == 21 * GIB // BLOCK
    assert blocks(probe, gpu_memory_utilization=1) == 61 * GIB // BLOCK


def test_no_process_of_an_engine_has_to_have_more_than_it_can():
    probe = FakeProbe(80 * GIB, 64 * GIB, 3 * GIB)
    assert blocks(probe, least_free=60 * GIB) == 49 * GIB // BLOCK
    assert blocks(probe, least_free=70 * GIB) == 53 * GIB // BLOCK
    host = FakeProbe(64 * GIB, 10 * GIB)
    assert blocks(host, device=torch.device("cpu"), least_free=5 * GIB) == 2 * GIB // BLOCK


def test_never_more_blocks_than_are_of_use():
    probe = FakeProbe(80 * GIB, 64 * GIB)
    assert blocks(probe, max_num_seqs=1, max_num_batched_tokens=512) == 2 * 131_072 // 16


def test_what_is_asked_for_goes_before_and_runs_nothing():
    def fail():
        raise AssertionError

    probe = FakeProbe(80 * GIB, 64 * GIB)
    assert blocks(probe, fail, num_kv_blocks=7) == 7
    assert blocks(probe, fail, kv_cache_memory=GIB) == GIB // BLOCK
    assert probe.runs == 0


def test_a_host_gives_a_share_of_what_is_free():
    probe = FakeProbe(64 * GIB, 10 * GIB)
    assert blocks(probe, device=torch.device("cpu")) == 4 * GIB // BLOCK


def test_more_than_a_device_has_is_refused_with_what_there_is():
    probe = FakeProbe(80 * GIB, 64 * GIB)
    with pytest.raises(KVCacheError) as raised:
        blocks(probe, kv_cache_memory=900 * GIB)
    assert str(raised.value) == (
        "kv_cache_memory asks for 900.00 GiB, but cuda:0 has 80.00 GiB of memory in all; "
        "lower kv_cache_memory, or leave it out to have it chosen"
    )


def test_this_machine_is_the_host(tiny_model: Path):
    with pytest.raises(KVCacheError, match=r"asks for 900\.00 GiB, but this machine has \d+\."):
        make_llm(tiny_model, num_kv_blocks=None, kv_cache_memory=900 * GIB)


@pytest.mark.parametrize(
    ("memory", "share", "advice"),
    [
        (
            DeviceMemory(80 * GIB, 9 * GIB, 2 * GIB),
            0.9,
            # 0.97 of 80 GiB less 73 GiB.
            f"raise gpu_memory_utilization: 0.97 would leave room for "
            f"{(int(0.97 * 80 * GIB) - 73 * GIB) // BLOCK * 16} tokens; or lower "
            "max_num_batched_tokens, which is 8192, or max_num_seqs, which is 256",
        ),
        (
            DeviceMemory(80 * GIB, 60 * GIB, 61 * GIB),
            0.9,
            "lower max_num_batched_tokens, which is 8192, or max_num_seqs, which is 256",
        ),
        (DeviceMemory(16 * GIB, GIB // 8, 0), 0.9, "take a smaller model"),
        (DeviceMemory(16 * GIB, BLOCK - 1, 0), 1.0, "end what else runs on the device"),
    ],
)
def test_nothing_left_says_what_would_help(memory, share, advice):
    args = EngineArgs(max_num_batched_tokens=8192, gpu_memory_utilization=share)
    with pytest.raises(KVCacheError) as raised:
        kv_cache_bytes(memory, args, CUDA, BLOCK)
    message = str(raised.value)
    assert advice in message
    assert f"gpu_memory_utilization {share} of {memory.total / GIB:.2f} GiB" in message
    assert f"take {(memory.total - memory.free) / GIB:.2f} GiB" in message
    assert f"a step of 8192 tokens {memory.step / GIB:.2f} GiB" in message


def test_room_for_one_block_is_enough():
    memory = DeviceMemory(10 * GIB, GIB + BLOCK, 0)
    assert kv_cache_bytes(memory, EngineArgs(), CUDA, BLOCK) == BLOCK
    less = DeviceMemory(10 * GIB, GIB + BLOCK - 1, 0)
    with pytest.raises(KVCacheError, match="no memory is left for the KV cache on cuda:0"):
        kv_cache_bytes(less, EngineArgs(), CUDA, BLOCK)


def test_a_step_that_does_not_fit_names_what_makes_it_large():
    def refuse():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    with pytest.raises(KVCacheError) as raised:
        blocks(FakeProbe(80 * GIB), refuse, max_num_seqs=8, max_num_batched_tokens=512)
    assert str(raised.value) == (
        "a step of 512 tokens does not fit beside the weights (CUDA out of memory. Tried to "
        "allocate 9 GiB); lower max_num_batched_tokens, or max_num_seqs, which is 8"
    )


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), True, "0.9", None])
def test_the_share_is_checked(value):
    with pytest.raises(ValueError, match="gpu_memory_utilization must be"):
        EngineArgs(gpu_memory_utilization=value)


@pytest.mark.parametrize(("num_tokens", "max_len"), [(30, 100), (100, 30), (64, 32), (1, 1)])
def test_the_longest_batch_ends_at_the_longest_length(num_tokens, max_len):
    batch = longest_batch(
        torch.device("cpu"), num_tokens=num_tokens, num_samples=3, max_len=max_len, block_size=8
    )
    chunks = batch.query_start.diff()
    assert chunks.sum() == len(batch.token_ids) == len(batch.positions) == num_tokens
    assert (batch.seq_lens == max_len).all()
    assert batch.positions.max() == max_len - 1
    ends = batch.positions[batch.query_start[1:].long() - 1]
    assert (ends == max_len - 1).all()
    assert batch.positions.min() >= 0
    assert batch.max_query_len == chunks.max()
    assert batch.slot_mapping.max() < 8
    assert batch.block_table.shape == (1, -(-max_len // 8))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_largest_step_runs(tiny_model: Path, kv_dtype, monkeypatch):
    model = load_model(tiny_model)
    shapes = []
    forward, logits = model.forward, model.logits
    monkeypatch.setattr(
        model, "forward", lambda batch: (shapes.append(len(batch.positions)), forward(batch))[1]
    )
    monkeypatch.setattr(
        model, "logits", lambda *call: (shapes.append(len(call[1])), logits(*call))[1]
    )
    run_largest_step(
        model,
        Backend("torch", ""),
        num_tokens=50,
        num_samples=5,
        max_len=128,
        block_size=16,
        vocab_size=tiny.VOCAB,
        kv_dtype=kv_dtype,
    )
    assert shapes == [50, 5]
