"""The other kernels against their references, over odd shapes, strides and NaN beside the data."""

import math

import pytest
import torch

from miniinfer import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# A GPU rounds to bfloat16, where a halfway case may go the other way; the interpreter truncates, at
# each of up to three steps.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if DEVICE == "cuda" else 2**-5}


def random(*shape, dtype=torch.float32, seed=0):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def assert_near(actual, expected):
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 7), (2, 64), (5, 576), (1, 1025)])
def test_rms_norm(rows, width, dtype):
    x, weight = random(rows, width, dtype=dtype) * 3, random(width, dtype=dtype, seed=1)
    residual = random(rows, width, dtype=dtype, seed=2)
    assert_near(kernels.rms_norm(x, weight, 1e-5), kernels.rms_norm_reference(x, weight, 1e-5))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = kernels.add_rms_norm_reference(x, residual, weight, 1e-5)
    assert_near(total, expected_total)
    assert_near(normed, expected_normed)


def test_rms_norm_of_strided_rows_and_zeros():
    wide = torch.full((4, 30), math.nan, device=DEVICE)
    wide[:, :13] = random(4, 13)
    wide[2, :13] = 0
    x, weight = wide[:, :13], random(13, seed=1)
    assert_near(kernels.rms_norm(x, weight, 1e-6), kernels.rms_norm_reference(x, weight, 1e-6))
    normed, _ = kernels.add_rms_norm(x, x, weight, 1e-6)
    assert_near(normed, kernels.rms_norm_reference(x + x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (3, 7), (2, 1024), (2, 1536)])
def test_silu_mul(rows, width, dtype):
    gate_up = random(rows, 2 * width, dtype=dtype) * 5
    output = kernels.silu_mul(gate_up)
    assert output.shape == (rows, width)
    assert_near(output, kernels.silu_mul_reference(gate_up))


# numpy warns in the interpreter; the infinite exponential is right, its inverse being zero.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_mul_of_great_numbers():
    gate_up = torch.tensor([[100.0, -100.0, 0.0, 2.0, 3.0, 4.0]], device=DEVICE)
    assert_near(kernels.silu_mul(gate_up), torch.tensor([[200.0, 0.0, 0.0]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "half"),
    [(0, 2, 1, 8, 4), (1, 1, 1, 2, 1), (5, 9, 3, 64, 32), (3, 5, 1, 80, 40), (4, 2, 2, 96, 10)],
)
def test_rotary(tokens, heads, kv_heads, head_dim, half, dtype):
    angles = random(50, half, seed=3) * 10
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32) * 11 % 50
    packed = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    results = []
    for apply in (kernels.apply_rotary, kernels.apply_rotary_reference):
        copy = packed.clone()
        query, key, _ = copy.split((heads, kv_heads, kv_heads), 1)
        apply(query, key, positions, angles.cos(), angles.sin())
        results.append(copy)
    assert_near(*results)
    assert torch.equal(results[0][..., 2 * half :], packed[..., 2 * half :])
    assert torch.equal(results[0][:, heads + kv_heads :], packed[:, heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "block_size", "kv_heads", "head_dim"),
    [(0, 4, 1, 8), (1, 1, 1, 1), (7, 3, 3, 80), (5, 16, 2, 64), (4, 2, 5, 256)],
)
def test_write_kv(tokens, block_size, kv_heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(9 * block_size, generator=generator)[:tokens].to(DEVICE)
    slots[1::3] = -1
    packed = random(tokens, 2 * kv_heads, head_dim, dtype=dtype)
    key, value = packed.chunk(2, 1)
    results = []
    for write in (kernels.write_kv, kernels.write_kv_reference):
        caches = torch.full((2, 9, block_size, kv_heads, head_dim), 7.0, device=DEVICE).to(dtype)
        write(key, value, caches[0], caches[1], slots)
        results.append(caches)
    assert torch.equal(*results)
    written = (results[0] != 7).flatten(3).any(-1).sum()
    assert written == 2 * (slots >= 0).sum()


def test_write_kv_into_one_tensor_of_keys_and_values():
    both = torch.zeros(4, 2, 8, 2, 16, device=DEVICE)
    key, value = random(3, 2, 16), random(3, 2, 16, seed=1)
    slots = torch.tensor([31, 0, 12], device=DEVICE)
    kernels.write_kv(key, value, both[:, 0], both[:, 1], slots)
    assert torch.equal(both[[3, 0, 1], 0, [7, 0, 4]], key)
    assert torch.equal(both[[3, 0, 1], 1, [7, 0, 4]], value)


def test_write_kv_beyond_2_31_elements():
    # Only the pages that are touched take memory.
    blocks = 2**31 // 1024 + 2
    cache = torch.empty(blocks, 16, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    key = random(2, 1, 64, dtype=torch.bfloat16)
    last = (blocks - 1) * 16 + 15
    cache[0, 0] = 0
    kernels.write_kv(key, key, cache, cache, torch.tensor([last, 5], device=DEVICE))
    assert torch.equal(cache[blocks - 1, 15], key[0])
    assert torch.equal(cache[0, 5], key[1])
    assert not cache[0, 0].any()
