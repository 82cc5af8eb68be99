"""The attention kernel against its reference, over odd shapes and hostile caches."""

import math

import pytest
import torch

from miniinfer.kernels import paged_attention, paged_attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make_case(
    requests,
    *,
    block_size=16,
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype=torch.float32,
    cache_dtype=None,
    seed=0,
):
    """Arguments for `requests`, pairs of (queries, context length), in a cache full of NaN.

    Blocks are dealt out in random order, table rows too; entries past the context are out of range.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for _, length in requests]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    order = torch.randperm(len(requests) + 1, generator=generator)[: len(requests)]
    table = torch.full((len(requests) + 1, max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    caches = [
        torch.full(
            (len(free), block_size, kv_heads, head_dim), math.nan, dtype=cache_dtype or dtype
        )
        for _ in range(2)
    ]
    for row, count, (_, length) in zip(order.tolist(), counts, requests, strict=True):
        for index in range(count):
            block = free.pop()
            table[row, index] = block
            used = min(block_size, length - index * block_size)
            for cache in caches:
                cache[block, :used] = random(used, kv_heads, head_dim).to(cache.dtype)
    starts = torch.tensor([0] + [queries for queries, _ in requests]).cumsum(0)
    arguments = (
        random(int(starts[-1]), heads, head_dim),
        *caches,
        starts.int(),
        torch.tensor([length for _, length in requests], dtype=torch.int32),
        order.int(),
        table,
    )
    return tuple(argument.to(DEVICE) for argument in arguments)


def assert_equals_reference(arguments, scale=None, num_splits=None, num_decodes=0, **options):
    query = arguments[0]
    queries = int(arguments[3].diff().max()) if len(arguments[4]) else 0
    output = paged_attention(
        *arguments,
        max_query_len=queries,
        scale=scale,
        num_splits=num_splits,
        num_decodes=num_decodes,
        **options,
    )
    default = query.shape[2] ** -0.5
    expected = paged_attention_reference(*arguments, scale=scale or default, **options)
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert output.isfinite().all()
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


MIXED = [(1, 1), (1, 16), (1, 17), (5, 5), (0, 9), (7, 40), (1, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim, dtype):
    assert_equals_reference(make_case([(1, 33), (3, 20)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 128])
def test_mixed_batch(block_size):
    assert_equals_reference(make_case(MIXED, block_size=block_size))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (8, 8), (5, 1)])
def test_head_groups(heads, kv_heads):
    case = make_case([(1, 19), (6, 30), (4, 4)], heads=heads, kv_heads=kv_heads, head_dim=16)
    assert_equals_reference(case)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 528])
@pytest.mark.parametrize("queries", [1, 2])
def test_block_and_tile_edges(length, queries):
    if queries <= length:
        assert_equals_reference(make_case([(queries, length)], heads=2, kv_heads=1, head_dim=32))


@pytest.mark.parametrize("blocks", [1, 2, 7, 32, 33])
def test_number_of_blocks(blocks):
    assert_equals_reference(make_case([(1, 4 * blocks), (1, 4 * blocks - 1)], block_size=4))


@pytest.mark.parametrize("queries", [16, 17, 33, 65])
def test_several_tiles_of_queries(queries):
    assert_equals_reference(make_case([(queries, queries + 5), (1, 8)], head_dim=16))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 1000])
def test_sliding_window(window):
    assert_equals_reference(make_case([(1, 100), (40, 90), (3, 3)], head_dim=16), window=window)


def test_blocks_before_the_window_are_not_read():
    arguments = make_case([(2, 100)], head_dim=16)
    table = arguments[6]
    row = int(arguments[5][0])
    # The window of the first query, at position 98, begins at 79: blocks 0 to 3 may be gone.
    expected = paged_attention(*arguments, max_query_len=2, window=20)
    table[row, :4] = 2**30
    output = paged_attention(*arguments, max_query_len=2, window=20)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap_and_scale(soft_cap):
    case = make_case([(1, 20), (5, 30)], head_dim=16)
    assert_equals_reference(case, soft_cap=soft_cap, scale=0.7)


def test_great_scores_do_not_overflow():
    arguments = make_case([(3, 40)], head_dim=16)
    arguments[0].mul_(1e3)
    assert_equals_reference(arguments)


def test_empty_batches():
    assert_equals_reference(make_case([]))
    assert_equals_reference(make_case([(0, 5), (0, 0)]))
    assert_equals_reference(make_case([(0, 0), (2, 7), (0, 3)]))


def test_strided_query_and_cache():
    query, key_cache, value_cache, *rest = make_case([(1, 20), (5, 30)], head_dim=16)
    wide = torch.cat((query, query, query), 1)[:, 4:8]
    both = torch.stack((key_cache, value_cache), 1)
    arguments = (wide, both[:, 0], both[:, 1], *rest)
    assert not wide.is_contiguous()
    assert_equals_reference(arguments)


def test_a_request_does_not_depend_on_its_neighbours():
    arguments = make_case(MIXED, head_dim=16)
    together = paged_attention(*arguments, max_query_len=7, num_splits=3)
    query, key_cache, value_cache, starts, lengths, rows, table = arguments
    for request in range(len(MIXED)):
        start, end = starts[request : request + 2].tolist()
        alone = paged_attention(
            query[start:end],
            key_cache,
            value_cache,
            torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            lengths[request : request + 1],
            rows[request : request + 1],
            table,
            max_query_len=7,
            num_splits=3,
        )
        assert torch.equal(alone, together[start:end])


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that is newly allocated holds NaN, so that what a kernel leaves out shows."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def poison(*args, allocate=allocate, **kwargs):
            new = allocate(*args, **kwargs)
            return new.fill_(math.nan) if new.is_floating_point() else new

        monkeypatch.setattr(torch, name, poison)


@pytest.mark.parametrize("num_splits", [2, 3, 12])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 528])
def test_splits_of_decodes(length, num_splits, poisoned):
    case = make_case([(1, length), (0, 5), (1, 33)], heads=5, kv_heads=1, head_dim=16)
    assert_equals_reference(case, num_splits=num_splits)


def test_splits_of_several_queries_windows_and_caps(poisoned):
    case = make_case([(3, 200), (1, 1), (2, 70)], heads=8, head_dim=48)
    for window in (None, 1, 40, 1000):
        assert_equals_reference(case, num_splits=4, window=window, soft_cap=20.0)


@pytest.mark.parametrize("num_decodes", [0, 1, 3])
def test_decodes_beside_chunks(num_decodes, poisoned):
    requests = [(1, 1), (1, 90), (1, 17), (80, 85), (0, 4), (3, 40)]
    case = make_case(requests, head_dim=16)
    assert_equals_reference(case, num_decodes=num_decodes, num_splits=2)
    assert_equals_reference(make_case(requests[:3], head_dim=16), num_decodes=3)


def test_many_ragged_requests(poisoned):
    # More requests than a step of the search for one, some of no query, some of several tiles.
    lengths = [1, 0, 37, 2, 0, 0, 65, 1, 16, 17, 33, 1, 0]
    case = make_case([(length, length + 3) for length in lengths], heads=4, kv_heads=1, head_dim=16)
    assert_equals_reference(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
def test_cache_of_8_bits(dtype, per_head, poisoned):
    case = make_case(
        [(1, 40), (9, 30), (1, 7)], head_dim=80, dtype=dtype, cache_dtype=torch.float8_e4m3fn
    )
    scales = torch.tensor([0.25, 3.0] if per_head else [0.5], device=DEVICE)
    for options in ({}, {"num_splits": 2}):
        assert_equals_reference(case, key_scale=scales, value_scale=scales * 1.5, **options)
    assert_equals_reference(case, value_scale=scales, window=11)
    assert_equals_reference(case)


def test_great_block_ids_do_not_overflow_a_product_of_32_bits():
    # Only the pages that are touched take memory. 70000 * 32768 elements are more than 2^31.
    cache = torch.empty(70_001, 16, 8, 256, dtype=torch.bfloat16, device=DEVICE)
    cache[70_000] = torch.randn(16, 8, 256)
    ints = {"dtype": torch.int32, "device": DEVICE}
    arguments = (
        torch.randn(1, 8, 256).to(DEVICE, torch.bfloat16),
        cache,
        cache,
        torch.tensor([0, 1], **ints),
        torch.tensor([9], **ints),
        torch.zeros(1, **ints),
        torch.tensor([[70_000]], **ints),
    )
    assert_equals_reference(arguments)


def test_strided_block_table():
    query, keys, values, starts, lengths, rows, table = make_case([(1, 40), (3, 20)], head_dim=16)
    wide = torch.full((table.shape[0], 2 * table.shape[1]), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, : table.shape[1]] = table
    strided = wide[:, : table.shape[1]]
    assert not strided.is_contiguous()
    assert_equals_reference((query, keys, values, starts, lengths, rows, strided))


def test_blocks_beyond_2_31_elements():
    # Only the pages that are touched take memory: one block at each end of 4 GiB.
    block_elements = 16 * 64
    blocks = 2**31 // block_elements + 2
    cache = torch.empty(blocks, 16, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    last = blocks - 1
    cache[last] = torch.randn(16, 1, 64)
    cache[0] = torch.randn(16, 1, 64)
    table = torch.tensor([[last, 0]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(1, 2, 64).to(DEVICE, torch.bfloat16)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert_equals_reference((query, cache, cache, starts, lengths, rows, table))
