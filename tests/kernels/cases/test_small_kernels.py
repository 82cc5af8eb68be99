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
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(0, 2, 8), (1, 1, 5), (3, 5, 80)])
def test_head_norm_of_heads_beside_others(tokens, heads, head_dim, dtype):
    packed = torch.full((tokens, heads + 2, head_dim), math.nan, device=DEVICE, dtype=dtype)
    packed[:, :heads] = random(tokens, heads, head_dim, dtype=dtype) * 3
    weight = random(heads, head_dim, dtype=dtype, seed=1)
    actual = kernels.head_norm(packed[:, :heads], weight, 1e-5)
    for head in range(heads):
        one = packed[:, head], weight[head]
        assert_near(actual[:, head], kernels.rms_norm_reference(*one, 1e-5))


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
    # Scaled, and two halves of one table, as models keep them.
    table = torch.cat((angles.cos(), angles.sin()), 1) * 1.25
    for interleaved in (False, True):
        results = []
        for apply in (kernels.apply_rotary, kernels.apply_rotary_reference):
            copy = packed.clone()
            query, key, _ = copy.split((heads, kv_heads, kv_heads), 1)
            apply(query, key, positions, *table.chunk(2, 1), interleaved=interleaved)
            results.append(copy)
            together = packed.clone()
            both = together[:, : heads + kv_heads]
            apply(both, None, positions, *table.chunk(2, 1), interleaved=interleaved)
            assert torch.equal(together, copy)
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


def every_fp8():
    """All finite numbers of the type, the halves between them, and what lies just beside these."""
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = finite[finite.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    edges = torch.tensor([1e-9, 2.0**-11, 447.0, 448.0, 464.0, 1e6, 3e38, math.inf, -math.inf])
    numbers = torch.cat((finite, halves, halves * (1 + 2e-7), halves * (1 - 2e-7), edges))
    return torch.cat((numbers, numbers.new_full((1,), math.nan)))


def test_write_kv_rounds_to_8_bits_as_torch_does():
    numbers = every_fp8().to(DEVICE)
    cache = torch.zeros(1, 1, 1, len(numbers), device=DEVICE).to(torch.float8_e4m3fn)
    other = cache.clone()
    key = numbers.view(1, 1, -1)
    kernels.write_kv(key, -key, cache, other, torch.tensor([0], device=DEVICE))
    for stored, wanted in ((cache, numbers), (other, -numbers)):
        expected = wanted.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        actual = stored.view(-1).view(torch.uint8)
        # A NaN has a sign that means nothing.
        same = (actual == expected) | (((actual | expected) & 0x7F) == 0x7F)
        assert same.all(), wanted[~same]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, [0.3], [0.01, 2.0, 7.0]])
def test_write_kv_to_8_bits_with_scales(scale, dtype):
    packed = random(6, 6, 80, dtype=dtype) * 30
    key, value = packed.chunk(2, 1)
    slots = torch.tensor([5, -1, 0, 17, 23, 2], device=DEVICE)
    scales = None if scale is None else torch.tensor(scale, device=DEVICE)
    results = []
    for write in (kernels.write_kv, kernels.write_kv_reference):
        caches = torch.full((2, 6, 4, 3, 80), 7.0, device=DEVICE).to(torch.float8_e4m3fn)
        write(key, value, *caches, slots, key_scale=scales, value_scale=scales)
        results.append(caches.view(torch.uint8))
    assert torch.equal(*results)


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
