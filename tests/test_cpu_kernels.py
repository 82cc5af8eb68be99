"""The kernels for CPUs: packed weights, linear layers, attention; against torch and numpy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miniinfer.attention import TorchAttention
from miniinfer.cpu.linear import (
    QuantLinear,
    kernel_isa,
    profile_kernels,
    set_kernel_threads,
)
from miniinfer.cpu.ops import cpu_paged_attention
from miniinfer.gguf_file import GGMLType
from miniinfer.model import ForwardBatch, KVCache
from miniinfer.model.dequantize import dequantize
from miniinfer.model.gguf_weights import KERNEL_TYPES
from miniinfer.model.ops import TorchOps


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    set_kernel_threads(2)
    yield
    set_kernel_threads(1)


def raw_rows(kind: GGMLType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes, scales aside, as rows of a type."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // kind.block_elements, kind.block_bytes))
    blocks = blocks.astype(np.uint8)
    if kind in (GGMLType.F32, GGMLType.BF16):
        values = random.standard_normal(rows * columns).astype(np.float32)
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        return (values if kind == GGMLType.F32 else halves).view(np.uint8).reshape(rows, -1)
    two = (GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q4_K, GGMLType.Q5_K)
    places = [208] if kind == GGMLType.Q6_K else [0, 2] if kind in two else [0]
    for place in places:
        scales = (0.1 * random.standard_normal(len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def test_inputs_of_bfloat16_weights_cost_their_rounding_alone() -> None:
    rows, columns = 45, 769
    weights = torch.randn(rows, columns).bfloat16()
    data = weights.view(torch.uint8).numpy()
    x = torch.randn(9, columns)
    linear = QuantLinear([(GGMLType.BF16, 0, data, rows, columns)])
    got = linear.forward(x, torch.full((9, rows), torch.nan))
    expected = torch.nn.functional.linear(x.double(), weights.double())
    # Each input is off by a 512th of itself at most.
    bound = torch.nn.functional.linear(x.abs().double(), weights.abs().double()) / 512 + 1e-4
    assert ((got - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", sorted(KERNEL_TYPES), ids=lambda kind: kind.name)
class TestTypes:
    def test_packed_rows_are_the_dequantised_ones(self, kind: GGMLType) -> None:
        rows, columns = 37, 512
        data = raw_rows(kind, rows, columns, 0)
        expected = np.empty(rows * columns, np.float32)
        dequantize(data.reshape(-1), kind, expected)
        linear = QuantLinear([(kind, 0, data, rows, columns)])
        assert linear.shape == (rows, columns)
        indices = torch.tensor([36, 0, 17, 17], dtype=torch.int32)
        got = linear.gather(indices, torch.full((4, columns), torch.nan))
        torch.testing.assert_close(
            got,
            torch.from_numpy(expected).view(rows, columns)[indices],
            rtol=1e-6,
            atol=1e-6,
        )

    @pytest.mark.parametrize("tokens", [1, 7, 8, 33])
    def test_products_are_torchs_within_8_bits(self, kind: GGMLType, tokens: int) -> None:
        rows, columns = 45, 768
        data = raw_rows(kind, rows, columns, tokens)
        weights = torch.empty(rows * columns)
        dequantize(data.reshape(-1), kind, weights.numpy())
        weights = weights.view(rows, columns)
        bias = torch.randn(rows)
        x = torch.randn(tokens, columns)
        if kind == GGMLType.BF16:
            # What inputs are rounded to where the processor multiplies bfloat16.
            x = x.bfloat16().float()
        linear = QuantLinear([(kind, 0, data, rows, columns)], bias.tolist())
        got = linear.forward(x, torch.full((tokens, rows), torch.nan))
        expected = torch.nn.functional.linear(x.double(), weights.double(), bias.double())
        if kind in (GGMLType.F32, GGMLType.BF16):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
            return
        # An input is off by at most half of a 127th of its group's largest, all signs independent.
        step = x.view(tokens, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32) / 127
        deviation = (step.reshape(tokens, -1).double() ** 2 / 12) @ (weights.double() ** 2).T
        assert ((got - expected).abs() <= 6 * deviation.sqrt() + 1e-4).all()


class TestRefusals:
    def test_weights(self) -> None:
        data = np.zeros((2, 20), np.uint8)
        with pytest.raises(ValueError, match="ggml type 10 has no kernel"):
            QuantLinear([(GGMLType.Q2_K, 0, data, 2, 32)])
        with pytest.raises(ValueError, match="a matrix of 3 x 32 needs 60 bytes, got 40"):
            QuantLinear([(GGMLType.Q4_1, 0, data, 3, 32)])
        with pytest.raises(ValueError, match=r"rows of 40 columns .* groups of 32"):
            QuantLinear([(GGMLType.Q4_1, 0, data, 2, 40)])
        with pytest.raises(ValueError, match="bias for 2 outputs has 3 elements"):
            QuantLinear([(GGMLType.Q4_1, 0, data, 2, 32)], [0.0, 0.0, 0.0])
        with pytest.raises(ValueError, match="same number of columns"):
            QuantLinear([])

    def test_tensors(self) -> None:
        linear = QuantLinear([(GGMLType.Q4_1, 0, np.zeros((2, 20), np.uint8), 2, 32)])
        x, out = torch.zeros(3, 32), torch.zeros(3, 2)
        linear.forward(x, out)
        for bad in (x.double(), torch.zeros(3, 31), torch.zeros(32, 3).T):
            with pytest.raises(ValueError, match=r"x must be float32 \[3, 32\]"):
                linear.forward(bad, out)
        with pytest.raises(ValueError, match=r"out must be float32 \[3, 2\]"):
            linear.forward(x, torch.zeros(3, 3))
        with pytest.raises(ValueError, match="norm must be"):
            linear.forward(x, out, norm=torch.ones(31))
        with pytest.raises(ValueError, match=r"x must be float32 \[3, 64\]"):
            linear.add_to(x, out, silu=True)
        with pytest.raises(IndexError, match="token 2 is not in the vocabulary of 2"):
            linear.gather(torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, 32))
        with pytest.raises(ValueError, match="indices must be int32"):
            linear.gather(torch.tensor([0]), torch.zeros(1, 32))

    def test_threads(self) -> None:
        with pytest.raises(ValueError, match="threads must be from 1 to 1024, got 0"):
            set_kernel_threads(0)
        assert kernel_isa() in ("avx512", "avx2", "neon_dotprod", "neon", "portable")

    def test_profile(self) -> None:
        linear = QuantLinear(
            [(GGMLType.F32, 8, np.ones(64 * 64, np.float32).view(np.uint8), 64, 64)]
        )
        profile_kernels(True)
        linear.forward(torch.ones(300, 64), torch.empty(300, 64))
        spent = profile_kernels(False)
        assert set(spent) == {"inputs", "products", "heads", "attention"}
        assert min(spent["inputs"], spent["products"]) > 0
        linear.forward(torch.ones(300, 64), torch.empty(300, 64))
        assert profile_kernels(False) == spent


BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 8, 6, 2, 48


def make_batch(lengths: list[tuple[int, int]], seed: int) -> tuple[ForwardBatch, int]:
    """Requests of (tokens before, new), decodes first, over shuffled blocks, and their number."""
    random = np.random.default_rng(seed)
    counts = [-(-(before + new) // BLOCK_SIZE) for before, new in lengths]
    blocks = random.permutation(sum(counts) + 3).astype(np.int32)
    table = np.full((len(lengths) + 2, max(counts) + 1), 2**31 - 1, np.int32)
    rows = random.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
    used, positions, slots = 0, [], []
    for row, count, (before, new) in zip(rows, counts, lengths, strict=True):
        own = blocks[used : used + count]
        used += count
        table[row, :count] = own
        for position in range(before, before + new):
            positions.append(position)
            slots.append(int(own[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
    new_tokens = [new for _, new in lengths]
    seq_lens = np.array([before + new for before, new in lengths], np.int32)
    query_start = np.cumsum([0, *new_tokens]).astype(np.int32)
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(seq_lens),
        rows=torch.from_numpy(rows),
        block_table=torch.from_numpy(table),
        logits_index=torch.zeros(0, dtype=torch.int32),
        num_decodes=sum(new == 1 for new in new_tokens),
        max_query_len=max(new_tokens),
        max_seq_len=int(seq_lens.max()),
        query_start_host=query_start,
        seq_lens_host=seq_lens,
    )
    return batch, len(blocks)


Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def operator_arguments(
    heads: torch.Tensor,
    cache: Any,
    table: torch.Tensor,
    batch: ForwardBatch,
    window: int = 0,
    scales: Scales | None = None,
) -> tuple[Any, ...]:
    own = (None, None) if cache.scales is None else cache.scales[0]
    return (
        heads,
        cache.keys[0],
        cache.values[0],
        *(own if scales is None else scales),
        table,
        batch.positions,
        batch.slot_mapping,
        batch.query_start,
        batch.seq_lens,
        batch.rows,
        batch.block_table,
        HEADS,
        batch.num_decodes,
        window,
    )


def attend(*arguments: Any, **named: Any) -> torch.Tensor:
    out: torch.Tensor = cpu_paged_attention(*operator_arguments(*arguments, **named))
    return out


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_attention_is_the_reference_backends(dtype: torch.dtype, window: int | None) -> None:
    batch, blocks = make_batch([(0, 1), (77, 1), (300, 1), (0, 70), (33, 65), (20, 3)], seed=1)
    sizes = (1, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache, reference = (KVCache(*sizes, kind, "cpu") for kind in (dtype, torch.float32))
    generator = torch.Generator().manual_seed(2)
    shape = reference.keys[0].shape
    context = [torch.randn(shape, generator=generator) for _ in range(2)]
    for stored, values in zip((reference.keys, reference.values), context, strict=True):
        stored[0].copy_(values)
    for side, (stored, values) in enumerate(zip((cache.keys, cache.values), context, strict=True)):
        if cache.scales is None:
            stored[0].copy_(values)
        else:
            scale = values.abs().amax(-1) / 127
            cache.scales[0][side].copy_(scale)
            stored[0].copy_((values / scale[..., None]).round())
    tokens = len(batch.positions)
    heads = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
    angles = torch.outer(torch.arange(400.0), torch.logspace(0, -3, HEAD_DIM // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)

    ops, split = TorchOps(), heads.view(tokens, -1, HEAD_DIM)
    rotary = ops.prepare_rotary(table, batch.positions, torch.float32)
    rotated = ops.rotary(split[:, : HEADS + KV_HEADS], rotary)
    backend = TorchAttention(reference)
    backend.write_kv(0, rotated[:, HEADS:], split[:, HEADS + KV_HEADS :], batch.slot_mapping)
    plan = backend.prepare(batch, [window])
    expected = backend.attend(0, rotated[:, :HEADS], plan, window).flatten(1)

    out = attend(heads, cache, table, batch, window or 0)
    limits = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.int8: 8e-2}
    torch.testing.assert_close(out, expected, rtol=0, atol=limits[dtype])


def test_attention_refuses_what_is_not_there() -> None:
    batch, blocks = make_batch([(5, 1)], seed=3)
    cache = KVCache(1, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    heads = torch.zeros(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    table = torch.zeros(6, HEAD_DIM)
    attend(heads, cache, table, batch)
    with pytest.raises(ValueError, match="position 5 is not in the cache of 5"):
        attend(heads, cache, table[:5], batch)
    with pytest.raises(ValueError, match="heads must be float32"):
        attend(heads[:, 1:], cache, table, batch)
    scales = torch.zeros(blocks, BLOCK_SIZE, KV_HEADS)
    with pytest.raises(ValueError, match="key_scales go with a cache of int8"):
        attend(heads, cache, table, batch, scales=(scales, scales))
    flat = SimpleNamespace(keys=[cache.keys[0].flatten()], values=cache.values, scales=None)
    with pytest.raises(ValueError, match=r"key_cache must be \[blocks, block size"):
        attend(heads, flat, table, batch)
    batch.block_table[batch.rows[0], 0] = blocks
    with pytest.raises(ValueError, match=f"block {blocks} is not in the cache of {blocks}"):
        attend(heads, cache, table, batch)
    batch.slot_mapping = batch.slot_mapping.int()
    with pytest.raises(ValueError, match="slot_mapping must be"):
        attend(heads, cache, table, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_attention_is_an_operator_of_torch(dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(5, 1), (0, 4)], seed=4)
    cache = KVCache(1, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype, "cpu")
    for tensor in (*cache.keys, *cache.values, *(cache.scales[0] if cache.scales else ())):
        tensor.fill_(1)
    heads = torch.randn(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    arguments = operator_arguments(heads, cache, torch.randn(6, HEAD_DIM), batch)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(cpu_paged_attention, arguments, test_utils=checks)
