"""The sampling kernels against the torch sampler, row by row and filter by filter."""

import math

import pytest
import torch

from miniinfer.kernels import _launch, sample, sample_reference
from miniinfer.sampling import SamplingBatch, TokenMasks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batch(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None, **changes):
    """Parameters of `rows` rows; each may be one number or a list."""

    def column(value, dtype):
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    if uniform is None:
        uniform = torch.rand(rows, generator=torch.Generator().manual_seed(9)).tolist()
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    batch = SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        uniform=column(uniform, torch.float32),
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        edit_sample=empty,
        edit_token=empty,
        edit_repetition=empty.float(),
        edit_bias=empty.float(),
        num_logprobs=-1,
    )
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


def random_logits(rows, vocab, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(DEVICE)


def assert_equals_reference(logits, batch, vocab_size=None):
    before = logits.clone()
    output = sample(logits, batch, vocab_size)
    expected = sample_reference(logits, batch, vocab_size)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were changed"
    assert output.sampled.dtype == torch.int32
    assert torch.equal(output.bad, expected.bad)
    assert torch.equal(output.sampled, expected.sampled)
    if batch.num_logprobs < 0:
        assert output.logprob is None
        return output
    good = ~output.bad
    assert torch.equal(output.rank[good], expected.rank[good])
    assert torch.equal(output.top_ids[good], expected.top_ids[good])
    for name in ("logprob", "top_logprobs"):
        actual, wanted = getattr(output, name)[good], getattr(expected, name)[good]
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    return output


@pytest.mark.parametrize("vocab", [1, 2, 33, 1000, 4096, 9001])
def test_every_token_may_be_drawn(vocab):
    assert_equals_reference(random_logits(8, vocab), make_batch(8, temperature=0.8))


@pytest.mark.parametrize("vocab", [3, 1000, 4100])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.95, "temperature": 0.6},
        {"top_k": 500, "top_p": 0.5, "min_p": 0.01, "temperature": 2.0},
        {"top_k": 10**6, "top_p": 0.999, "temperature": 5.0},
    ],
    ids=str,
)
def test_filters(vocab, filters):
    assert_equals_reference(random_logits(4, vocab), make_batch(4, **filters))


def test_each_row_has_its_own_parameters():
    batch = make_batch(
        6,
        temperature=[0.0, 1.0, 0.7, 1.0, 1.3, 1e-4],
        top_k=[0, -1, 5, 0, 0, 3],
        top_p=[1.0, 1.0, 1.0, 0.8, 1.0, 0.5],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.1, 0.2],
    )
    output = assert_equals_reference(random_logits(6, 777), batch)
    for row in range(6):
        alone = make_batch(1)
        for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
            setattr(alone, name, getattr(batch, name)[row : row + 1])
        assert sample(random_logits(6, 777)[row : row + 1], alone).sampled == output.sampled[row]


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-24])
def test_equal_logits_lie_by_id(uniform):
    logits = torch.zeros(4, 100, device=DEVICE)
    logits[:, 50:] = -1.0
    logits[1, 70] = 2.0
    logits[2] = 5.0
    filters = {"top_k": [10, 0, 7, 60], "top_p": [0.5, 0.3, 0.5, 1.0], "uniform": uniform}
    assert_equals_reference(logits, make_batch(4, **filters))


def test_draws_follow_the_distribution():
    uniform = ((torch.arange(32) + 0.5) / 32).tolist()
    logits = torch.tensor([0.5, 0.125, 0.25, 0.125]).log().repeat(32, 1).to(DEVICE)
    by_id = sample(logits, make_batch(32, uniform=uniform)).sampled
    assert by_id.tolist() == [0] * 16 + [1] * 4 + [2] * 8 + [3] * 4
    by_rank = sample(logits, make_batch(32, uniform=uniform, min_p=0.01)).sampled
    assert by_rank.tolist() == [0] * 16 + [2] * 8 + [1] * 4 + [3] * 4
    nucleus = sample(logits, make_batch(32, uniform=uniform, top_p=0.7)).sampled
    assert set(nucleus.tolist()) == {0, 2}


def test_more_candidates_than_a_tile():
    # All are kept, so that nothing is small enough to be packed early.
    logits = random_logits(2, 5000, scale=0.01)
    assert_equals_reference(logits, make_batch(2, top_k=4700, top_p=0.9, temperature=1.5))
    many_ties = torch.zeros(2, 5000, device=DEVICE)
    many_ties[:, ::3] = 1.0
    assert_equals_reference(many_ties, make_batch(2, top_k=3000, top_p=0.8))


def test_greedy_rows_take_the_first_of_the_greatest():
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[0, [4999, 4100, 7]] = 3.0
    logits[1, 4096:] = 1.0
    output = assert_equals_reference(logits, make_batch(3, temperature=0.0, all_greedy=True))
    assert output.sampled.tolist() == [7, 4096, 0]


def test_bad_rows_and_rows_without_a_token():
    logits = random_logits(6, 200)
    logits[0, 5] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, 1:] = -math.inf
    logits[4, :150] = -1e38
    for filters in ({}, {"top_k": 5, "top_p": 0.9}):
        output = assert_equals_reference(logits, make_batch(6, num_logprobs=3, **filters))
        assert output.bad.tolist() == [True, True, False, False, False, False]
        assert output.sampled[:4].tolist() == [-1, -1, 0, 0]


def test_edits():
    logits = random_logits(3, 300)
    batch = make_batch(
        3,
        top_k=[0, 3, 0],
        temperature=[1.0, 0.5, 0.0],
        edit_sample=torch.tensor([0, 1, 2, 2, 1], dtype=torch.int32, device=DEVICE),
        edit_token=torch.tensor([7, 299, 11, 12, 0], dtype=torch.int32, device=DEVICE),
        edit_repetition=torch.tensor([1.0, 0.2, 1.5, 1.0, 3.0], device=DEVICE),
        edit_bias=torch.tensor([100.0, -math.inf, 0.0, 100.0, 50.0], device=DEVICE),
        num_logprobs=2,
    )
    output = assert_equals_reference(logits, batch)
    assert output.sampled.tolist()[0] == 7
    assert output.sampled.tolist()[2] == 12


@pytest.mark.parametrize("vocab", [31, 32, 33, 1000])
@pytest.mark.parametrize("padding", [0, 5])
def test_masks_of_grammars(vocab, padding):
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(5, vocab, generator=generator) < 0.3
    allowed[0] = False
    allowed[0, vocab - 1] = True
    allowed[1] = False
    bits = torch.nn.functional.pad(allowed, (0, -vocab % 32)).unflatten(1, (-1, 32)).long()
    words = (bits << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32).to(DEVICE)
    # Rows 1 and 4 may choose any token.
    rows = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32, device=DEVICE)
    batch = make_batch(
        7,
        top_p=[1.0, 1.0, 0.9, 1.0, 0.7, 0.9, 1.0],
        temperature=[1.0, 1.0, 1.0, 0.0, 2.0, 2.0, 1.0],
        num_logprobs=4,
        masks=TokenMasks(rows, words),
    )
    logits = random_logits(7, vocab + padding)
    logits[:, vocab:] = math.nan
    output = assert_equals_reference(logits, batch, vocab)
    assert output.sampled[0] == vocab - 1
    assert output.sampled[2] == 0
    for row, mask in ((3, 2), (5, 3), (6, 4)):
        assert allowed[mask, output.sampled[row]]


@pytest.mark.parametrize("num_logprobs", [0, 1, 20, 70, 5000])
@pytest.mark.parametrize("vocab", [50, 4200])
def test_logprobs(vocab, num_logprobs):
    if num_logprobs > vocab == 4200:
        num_logprobs = 100
    logits = random_logits(3, vocab)
    logits[1] = logits[1].round()
    logits[2, 10:] = -math.inf
    assert_equals_reference(logits, make_batch(3, top_k=30, num_logprobs=num_logprobs))


def test_padding_columns_are_never_looked_at():
    logits = torch.full((4, 140), math.nan, device=DEVICE)
    logits[:, :100] = random_logits(4, 100)
    batch = make_batch(4, top_p=[1.0, 0.9, 1.0, 1.0], temperature=[1.0, 1.0, 1.0, 0.0])
    batch.num_logprobs = 2
    assert_equals_reference(logits, batch, vocab_size=100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_of_logits(dtype):
    logits = random_logits(4, 500).to(dtype)
    assert_equals_reference(logits, make_batch(4, top_k=[0, 8, 0, 0], num_logprobs=5))
    assert_equals_reference(logits, make_batch(4, all_greedy=True, temperature=0.0))


def test_no_rows():
    output = sample(torch.zeros(0, 10, device=DEVICE), make_batch(0, num_logprobs=2))
    assert output.sampled.shape == (0,)
    assert output.top_ids.shape == (0, 2)


def test_random_rows_of_every_kind(monkeypatch):
    # Small tiles: many of them, and packing in stages.
    monkeypatch.setattr(_launch, "_SCAN_TILE", 128)
    generator = torch.Generator().manual_seed(5)

    def choice(values, rows):
        return [values[int(i)] for i in torch.randint(len(values), (rows,), generator=generator)]

    for seed in range(4):
        rows = 5
        logits = random_logits(rows, 200, scale=float(1 + seed), seed=seed)
        if seed % 2:
            logits = logits.round()
        batch = make_batch(
            rows,
            temperature=choice([0.0, 0.3, 1.0, 2.5], rows),
            top_k=choice([0, 1, 2, 50, 150, 199, 200], rows),
            top_p=choice([1.0, 0.99, 0.8, 0.1], rows),
            min_p=choice([0.0, 0.0, 0.01, 0.5], rows),
            uniform=torch.rand(rows, generator=generator).tolist(),
            num_logprobs=seed,
        )
        assert_equals_reference(logits, batch)
