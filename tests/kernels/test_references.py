"""The torch references against independent formulas, and the checks of arguments."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from miniinfer import kernels
from miniinfer.sampling import SamplingBatch, TokenMasks


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("chunk", [1, 3, 37])
def test_paged_attention_is_attention_over_the_sequence(window, chunk):
    length, block_size, head_dim = 37, 8, 16
    query, key = random(chunk, 6, head_dim), random(length, 2, head_dim, seed=1)
    value = random(length, 2, head_dim, seed=2)
    table = torch.tensor([[0, 0, 0, 0, 0, 0], [7, 2, 9, 0, 4, 10**6]], dtype=torch.int32)
    key_cache = torch.full((10, block_size, 2, head_dim), math.nan)
    value_cache = key_cache.clone()
    positions = torch.arange(length)
    slots = table[1, positions // block_size].long() * block_size + positions % block_size
    kernels.write_kv_reference(key, value, key_cache, value_cache, slots)
    output = kernels.paged_attention(
        query,
        key_cache,
        value_cache,
        torch.tensor([0, chunk], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        table,
        max_query_len=chunk,
        window=window,
    )
    distance = positions[-chunk:, None] - positions
    mask = (distance >= 0) & (distance < (window or length))
    expected = scaled_dot_product_attention(
        query.transpose(0, 1),
        key.repeat_interleave(3, 1).transpose(0, 1),
        value.repeat_interleave(3, 1).transpose(0, 1),
        attn_mask=mask,
    )
    torch.testing.assert_close(output, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_rms_norm_is_the_norm_of_torch():
    x, weight, residual = random(3, 40), random(40, seed=1), random(3, 40, seed=2)
    expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, kernels.rms_norm(total, weight, 1e-5))


def test_rotary_turns_complex_numbers():
    query, key = random(4, 3, 10), random(4, 1, 10, seed=1)
    positions = torch.tensor([0, 5, 2, 7], dtype=torch.int32)
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01]))
    turned_query, turned_key = query.clone(), key.clone()
    kernels.apply_rotary(turned_query, turned_key, positions, angles.cos(), angles.sin())
    turn = torch.polar(torch.ones(4, 3), angles[positions.long()]).unsqueeze(1)
    for before, after in ((query, turned_query), (key, turned_key)):
        expected = torch.complex(before[..., :3], before[..., 3:6]) * turn
        torch.testing.assert_close(after[..., :3], expected.real)
        torch.testing.assert_close(after[..., 3:6], expected.imag)
        assert torch.equal(after[..., 6:], before[..., 6:])
    assert torch.equal(turned_query[0], query[0])


def test_silu_mul():
    gate_up = random(3, 14)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    torch.testing.assert_close(kernels.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


def test_write_kv_goes_slot_by_slot():
    key, value = random(4, 2, 3), random(4, 2, 3, seed=1)
    key_cache, value_cache = torch.zeros(3, 5, 2, 3), torch.zeros(3, 5, 2, 3)
    kernels.write_kv(key, value, key_cache, value_cache, torch.tensor([14, -1, 0, 6]))
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[2, 4], new[0])
        assert torch.equal(cache[0, 0], new[2])
        assert torch.equal(cache[1, 1], new[3])
        assert cache.flatten(2).any(-1).sum() == 3


BAD_CALLS = {
    "x must have shape": lambda: kernels.rms_norm(random(3), random(3), 1e-5),
    "weight must have shape": lambda: kernels.rms_norm(random(2, 3), random(4), 1e-5),
    "dimensions of x must be contiguous": lambda: kernels.rms_norm(
        random(3, 2).t(), random(3), 1e-5
    ),
    "residual must have shape": lambda: kernels.add_rms_norm(
        random(2, 3), random(1, 3), random(3), 1e-5
    ),
    "gate_up must have shape": lambda: kernels.silu_mul(random(2, 3)),
    "cos turns 8": lambda: kernels.apply_rotary(
        random(2, 1, 6), random(2, 1, 6), torch.zeros(2), random(9, 4), random(9, 4)
    ),
    "sin must have shape": lambda: kernels.apply_rotary(
        random(2, 1, 8), random(2, 1, 8), torch.zeros(2), random(9, 4), random(9, 3)
    ),
    "key must have shape": lambda: kernels.write_kv(
        random(2, 1, 4), random(2, 1, 4), random(3, 2, 2, 4), random(3, 2, 2, 4), torch.zeros(2)
    ),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_shapes_are_checked(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": random(2, 3, 8)}, "no multiple of 2 KV heads"),
        ({"query": random(2, 4, 9)}, "query must have shape"),
        ({"query": random(2, 32)}, "must have 3, 4 and 2 dimensions"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows must have shape"),
        ({"query_start": torch.zeros(3, dtype=torch.int32)}, "query_start must have shape"),
        ({"value_cache": random(3, 4, 2, 7)}, "value_cache must have shape"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be greater than 0; got 0.0"),
        ({"num_splits": 0}, "num_splits must be between 1 and 1024; got 0"),
        ({"num_decodes": 2}, "num_decodes must be between 0 and 1 requests; got 2"),
        ({"value_scale": torch.ones(1)}, "value_scale is for a cache of"),
    ],
)
def test_attention_arguments_are_checked(changed, message):
    arguments = {
        "query": random(2, 4, 8),
        "key_cache": random(3, 4, 2, 8),
        "value_cache": random(3, 4, 2, 8),
        "query_start": torch.tensor([0, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([2], dtype=torch.int32),
        "rows": torch.zeros(1, dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "max_query_len": 2,
    }
    kernels.paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(**(arguments | changed))


def test_sampling_arguments_are_checked():
    def batch(rows, **changes):
        index = torch.arange(rows)
        numbers = dict.fromkeys(("temperature", "top_p", "min_p", "uniform"), index.float())
        numbers |= {"edit_sample": index[:0], "edit_token": index[:0]}
        numbers |= {"edit_repetition": index[:0].float(), "edit_bias": index[:0].float()}
        flags = dict.fromkeys(("all_greedy", "any_top_k", "any_top_p", "any_min_p"), False)
        return SamplingBatch(**numbers, top_k=index, **flags, num_logprobs=-1, **changes)

    rows, words = torch.zeros(1).int(), torch.zeros(1, 2).int()
    for arguments, message in (
        ((random(6), batch(2)), "must be floats"),
        ((torch.zeros(2, 3).int(), batch(2)), "must be floats"),
        ((random(2, 3), batch(2), 4), "between 1 and 3 columns; got 4"),
        ((random(2, 0), batch(2)), "between 1 and 0 columns"),
        ((random(3, 2).t(), batch(2)), "dimensions of logits must be contiguous"),
        ((random(2, 3), batch(3)), "temperature must have shape"),
        ((random(2, 65), batch(2, masks=TokenMasks(rows, words))), "masks.bits must have shape"),
        ((random(2, 64), batch(2, masks=TokenMasks(rows, words.long()))), "bits must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.sample(*arguments)


def test_types_and_scales_of_caches_are_checked():
    keys, cache = random(2, 2, 4), torch.zeros(3, 2, 2, 4)
    small, slots = cache.to(torch.float8_e4m3fn), torch.zeros(2).long()
    for caches, scale, message in (
        ((cache, small), None, "must be both torch.float32 or both torch.float8_e4m3fn"),
        ((cache.half(), cache.half()), None, "got torch.float16 and torch.float16"),
        ((cache, cache), torch.ones(1), "key_scale is for a cache of torch.float8_e4m3fn"),
        ((small, small), torch.ones(3), r"float32 of shape \(1,\) or \(2,\)"),
        ((small, small), torch.ones(2).half(), "got torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.write_kv(keys, keys, *caches, slots, key_scale=scale)
