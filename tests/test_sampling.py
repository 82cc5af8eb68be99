"""The sampler against a plain one that sorts, filters and walks the distribution row by row."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from miniinfer.sampling import SamplingBatch, TokenMasks, sample, sample_with_torch

INF = float("inf")


def make_batch(count, edits=(), num_logprobs=-1, **columns):
    """A batch whose columns are numbers for all rows or lists with one number per row."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5} | columns
    tensors = {
        name: torch.as_tensor(value, dtype=torch.int32 if name == "top_k" else torch.float32)
        .expand(count)
        .contiguous()
        for name, value in given.items()
    }
    rows, tokens, repetitions, biases = zip(*edits, strict=True) if edits else ((), (), (), ())
    return SamplingBatch(
        **tensors,
        all_greedy=bool((tensors["temperature"] == 0).all()),
        any_top_k=bool((tensors["top_k"] > 0).any()),
        any_top_p=bool((tensors["top_p"] < 1).any()),
        any_min_p=bool((tensors["min_p"] > 0).any()),
        edit_sample=torch.tensor(rows, dtype=torch.int32),
        edit_token=torch.tensor(tokens, dtype=torch.int32),
        edit_repetition=torch.tensor(repetitions, dtype=torch.float32),
        edit_bias=torch.tensor(biases, dtype=torch.float32),
        num_logprobs=num_logprobs,
    )


def reference_distribution(logits, temperature, top_k, top_p, min_p):
    """Ids in their order along the distribution, and their weights, for one row of logits."""
    top_k = top_k if 0 < top_k < logits.shape[0] else 0
    weights = ((logits - logits.max()) / temperature).exp()
    weights = torch.where(weights >= min_p, weights, 0.0).double()
    if top_k == 0 and top_p == 1 and min_p == 0:
        return torch.arange(logits.shape[0]), weights
    order = logits.sort(descending=True, stable=True).indices
    weights = weights[order]
    if top_k:
        weights[top_k:] = 0
    before = weights.cumsum(0) - weights
    weights[before >= top_p * weights.sum()] = 0
    return order, weights


def reference_token(logits, temperature, top_k, top_p, min_p, uniform):
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    order, weights = reference_distribution(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(0)
    target = (uniform + 2**-25) * cumulative[-1]
    return int(order[int((cumulative > target).nonzero()[0])])


def assert_equals_reference(logits, batch, vocab_size=None):
    before = logits.clone()
    output = sample(logits, batch, vocab_size)
    assert torch.equal(logits, before), "the edits were not undone"
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
    expected = [
        reference_token(row[:vocab_size], *(column[i].item() for column in columns))
        for i, row in enumerate(logits)
    ]
    assert output.sampled.dtype == torch.int32
    assert output.sampled.tolist() == expected
    assert not output.bad.any()


COMBINATIONS = list(
    itertools.product((0.0, 0.3, 1.0, 5.0), (0, 1, 5, 100), (1.0, 0.9, 0.3), (0.0, 0.1))
)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_every_combination_of_filters_in_one_batch(vocab_size, spread):
    generator = torch.Generator().manual_seed(vocab_size)
    rows = len(COMBINATIONS)
    temperature, top_k, top_p, min_p = zip(*COMBINATIONS, strict=True)
    for _ in range(3):
        logits = torch.randn(rows, vocab_size, generator=generator) * spread
        uniform = torch.rand(rows, generator=generator)
        batch = make_batch(
            rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform
        )
        assert_equals_reference(logits, batch)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_one_combination_alone_for_many_uniforms(combination):
    generator = torch.Generator().manual_seed(5)
    temperature, top_k, top_p, min_p = combination
    row = torch.randn(300, generator=generator) * 2
    uniform = torch.cat((torch.tensor([0.0, 1 - 2**-24]), torch.rand(60, generator=generator)))
    batch = make_batch(
        62, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform
    )
    assert_equals_reference(row.repeat(62, 1), batch)


@pytest.mark.parametrize("top_k", [0, 1, 40, 64, 513, 9000])
@pytest.mark.parametrize("top_p", [0.05, 0.95, 0.999999, 1.0])
def test_large_vocabulary_takes_every_length_of_candidate_list(top_k, top_p):
    generator = torch.Generator().manual_seed(top_k)
    spreads = torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0]).unsqueeze(1)
    logits = torch.randn(5, 20_000, generator=generator) * spreads
    for uniform in (0.0, 0.37, 0.9999):
        assert_equals_reference(logits, make_batch(5, top_k=top_k, top_p=top_p, uniform=uniform))


@pytest.mark.parametrize("top_k", [0, 3, 70, 600])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_ties_go_by_id(top_k, top_p):
    # Few distinct values, as bfloat16 logits have, so that every cut falls among equal ones.
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (16, 9000), generator=generator).float()
    logits[:8, ::2] *= -0.0  # both zeros are equal
    uniform = torch.rand(16, generator=generator)
    assert_equals_reference(logits, make_batch(16, top_k=top_k, top_p=top_p, uniform=uniform))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_frequencies_follow_the_distribution(filters):
    row = torch.tensor([2.0, -INF, 1.0, 0.5, 1.0, -1.0, 3.0, -4.0])
    draws = 40_000
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    batch = make_batch(draws, temperature=0.8, uniform=uniform, **filters)
    counts = sample(row.repeat(draws, 1), batch).sampled.bincount(minlength=8)
    arguments = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    order, weights = reference_distribution(row, 0.8, **arguments)
    expected = torch.zeros(8, dtype=torch.double).scatter_(0, order, weights / weights.sum())
    assert (counts[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() <= 5 * deviation).all()


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    rows = len(COMBINATIONS)
    logits = torch.randn(rows, 3000, generator=generator) * 3
    temperature, top_k, top_p, min_p = zip(*COMBINATIONS, strict=True)
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    columns["uniform"] = torch.rand(rows, generator=generator).tolist()
    edits = [(i, t, 2.0, -0.5) for i in range(0, rows, 2) for t in (1, 7)]
    together = sample(logits, make_batch(rows, edits, 5, **columns))
    order = torch.randperm(rows, generator=generator).tolist()
    place = {row: i for i, row in enumerate(order)}
    shuffled = sample(
        logits[order],
        make_batch(
            rows,
            [(place[i], *edit) for i, *edit in edits],
            5,
            **{name: [column[i] for i in order] for name, column in columns.items()},
        ),
    )
    for name in ("sampled", "logprob", "rank", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(shuffled, name), getattr(together, name)[order]), name
    for i in range(rows):
        alone = make_batch(
            1,
            [(0, *edit) for j, *edit in edits if j == i],
            5,
            **{name: column[i] for name, column in columns.items()},
        )
        output = sample(logits[i : i + 1], alone)
        assert output.sampled.item() == together.sampled[i].item()
        assert output.logprob.item() == together.logprob[i].item()


@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 1e-40])
@pytest.mark.parametrize("filters", [{}, {"top_p": 1e-4}, {"top_k": 5}, {"min_p": 1.0}])
def test_tiny_temperature_is_greedy(temperature, filters):
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(8, 5000, generator=generator) * 20).half().float().clamp(max=59.5)
    logits[0, 17] = logits[0, 4000] = 60.0
    mixed = make_batch(8, temperature=[temperature, 1.0] * 4, uniform=0.999, **filters)
    output = sample(logits, mixed)
    assert output.sampled[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert output.sampled[0] == 17
    ordinary = make_batch(8, temperature=1.0, uniform=0.999, **filters)
    assert torch.equal(output.sampled[1::2], sample(logits, ordinary).sampled[1::2])


def test_small_temperature_has_no_nan():
    logits = torch.tensor([[60.0, 59.9, -60.0, -INF]])
    for temperature in (1.1e-5, 1e-4, 1e-3):
        for filters in ({}, {"top_p": 0.5}, {"top_k": 2}):
            batch = make_batch(1, temperature=temperature, uniform=0.9999, **filters)
            assert sample(logits, batch).sampled.tolist() == [0]


def test_great_temperature_is_nearly_uniform():
    logits = torch.tensor([[60.0, 0.0, -60.0, -INF]]).repeat(3, 1)
    batch = make_batch(3, temperature=1e30, uniform=[0.1, 0.5, 0.9])
    assert sample(logits, batch).sampled.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("column", [0, 70, 99, 128])
def test_rows_without_a_distribution_are_reported(value, column):
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 5)):
        logits = torch.zeros(3, 129)
        logits[:, 50] = 100.0
        logits[1, column] = value
        output = sample(logits, make_batch(3, num_logprobs=2, temperature=temperature, top_k=top_k))
        assert output.bad.tolist() == [False, True, False]
        assert output.sampled.tolist() == [50, -1, 50]
        assert output.top_ids[0].tolist() == [50, 0]


def test_nan_in_the_padding_is_ignored():
    logits = torch.zeros(1, 8)
    logits[0, 6:] = math.nan
    output = sample(logits, make_batch(1, num_logprobs=3), vocab_size=6)
    assert not output.bad.any()
    assert output.logprob.item() == pytest.approx(-math.log(6))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0.0}])
@pytest.mark.parametrize("vocab_size", [3, 200])
def test_row_without_one_possible_token_takes_the_first(filters, vocab_size):
    logits = torch.zeros(2, vocab_size)
    logits[0] = -INF
    output = sample(logits, make_batch(2, num_logprobs=2, uniform=0.0, **filters))
    assert output.sampled.tolist() == [0, 0]
    assert output.logprob[0].item() == -INF
    assert output.rank.tolist() == [1, 1]
    assert not output.bad.any()


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((5, 500), -INF)
    logits[:, 99] = logits[:, 400] = 1.0
    uniform = [0.0, 0.49, 0.51, 0.9, 1 - 2**-24]
    for filters in ({}, {"top_p": 0.99}, {"top_k": 100}, {"min_p": 0.5}):
        output = sample(logits, make_batch(5, uniform=uniform, **filters))
        assert output.sampled.tolist() == [99, 99, 400, 400, 400]


@pytest.mark.parametrize("columns", [8, 1000, 20_008])
def test_padding_columns_are_never_sampled(columns):
    vocab_size = columns - 7
    logits = torch.randn(12, columns, generator=torch.Generator().manual_seed(6))
    logits[:, vocab_size:] = 50.0
    for filters in ({}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}):
        uniform = torch.arange(12) / 12
        batch = make_batch(12, num_logprobs=3, uniform=uniform, **filters)
        assert_equals_reference(logits, batch, vocab_size)
        assert (sample(logits, batch, vocab_size).top_ids < vocab_size).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits(temperature):
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0, -INF]] * 3)
    before = logits.clone()
    edits = [
        (0, 0, 2.0, 0.0),
        (0, 1, 2.0, 0.5),
        (0, 2, 2.0, 0.25),
        (0, 4, 1.0, 100.0),
        (2, 0, 1.0, -INF),
        (2, 3, 1.0, -INF),
    ]
    edited = torch.tensor([[1.0, -3.5, 0.25, 1.0, -INF], [2.0, -2.0, 0.0, 1.0, -INF]])
    edited = torch.cat((edited, torch.tensor([[-INF, -2.0, 0.0, -INF, -INF]])))
    for uniform in torch.linspace(0, 0.999, 50):
        columns = {"temperature": temperature, "uniform": uniform}
        output = sample(logits, make_batch(3, edits, **columns))
        assert torch.equal(logits, before)
        expected = sample(edited, make_batch(3, **columns))
        assert torch.equal(output.sampled, expected.sampled)


def test_a_bias_of_100_forces_and_minus_100_bans():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(8))
    edits = [(0, 5, 1.0, 100.0), (1, 5, 1.0, -100.0)]
    for uniform in torch.linspace(0, 0.999, 50):
        output = sample(logits, make_batch(2, edits, uniform=uniform))
        assert output.sampled[0] == 5
        assert output.sampled[1] != 5


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 100, 20_000])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3, "temperature": 0.5}])
def test_logprobs_are_those_of_the_model(vocab_size, filters):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator) * 4
    edits = [(i, vocab_size - 1, 1.0, 50.0) for i in range(0, 6, 2)]
    batch = make_batch(6, edits, 20, uniform=torch.rand(6, generator=generator), **filters)
    output = sample(logits, batch)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, output.sampled.long().unsqueeze(1))
    torch.testing.assert_close(output.logprob.double(), chosen.squeeze(1), atol=1e-5, rtol=0)
    assert output.rank.tolist() == ((expected > chosen).sum(-1) + 1).tolist()
    values, ids = expected.sort(descending=True, stable=True)
    count = min(20, vocab_size)
    assert output.top_ids.tolist() == ids[:, :count].tolist()
    torch.testing.assert_close(output.top_logprobs.double(), values[:, :count], atol=1e-5, rtol=0)
    assert output.logprob.dtype == output.top_logprobs.dtype == torch.float32
    assert output.rank.dtype == output.top_ids.dtype == torch.int32
    if edits:
        assert output.sampled[0] == vocab_size - 1, "the edit decides what is sampled"


def test_top_ids_of_equal_logits_go_by_id():
    output = sample(torch.zeros(2, 10_000), make_batch(2, num_logprobs=20, temperature=0.0))
    assert output.top_ids.tolist() == [list(range(20))] * 2
    assert output.rank.tolist() == [1, 1]


def test_logprobs_without_alternatives():
    output = sample(torch.zeros(2, 8), make_batch(2, num_logprobs=0))
    assert output.top_ids.shape == output.top_logprobs.shape == (2, 0)
    torch.testing.assert_close(output.logprob, torch.full((2,), -math.log(8)))


def test_no_logprobs_unless_asked():
    output = sample(torch.zeros(2, 8), make_batch(2))
    assert output.logprob is output.rank is output.top_ids is output.top_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_batch(temperature):
    batch = make_batch(0, num_logprobs=3, temperature=temperature, top_k=3, top_p=0.5)
    batch.all_greedy = temperature == 0
    batch.any_top_k = batch.any_top_p = batch.any_min_p = True
    output = sample(torch.zeros(0, 100), batch)
    assert output.sampled.shape == output.bad.shape == output.logprob.shape == (0,)
    assert output.top_ids.shape == (0, 3)


def test_flags_set_for_nothing_change_nothing():
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(9))
    uniform = torch.arange(40) / 40
    batch = make_batch(40, uniform=uniform)
    expected = sample(logits, batch).sampled
    batch.any_top_k = batch.any_top_p = batch.any_min_p = True
    assert torch.equal(sample(logits, batch).sampled, expected)
    off = make_batch(40, uniform=uniform, top_k=[-1, 700, 2**31 - 1, 0] * 10)
    assert torch.equal(sample(logits, off).sampled, expected)


@pytest.mark.parametrize(
    ("logits", "vocab_size", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.bfloat16), None, "float32"),
        (torch.zeros(5), None, "shape"),
        (torch.zeros(2, 0), None, "vocab_size"),
        (torch.zeros(2, 5), 6, "between 1 and 5 columns; got 6"),
        (torch.zeros(2, 5), 0, "vocab_size"),
        (torch.zeros(3, 5), None, "3 rows for 2"),
    ],
)
def test_shapes_are_checked(logits, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        sample(logits, make_batch(2), vocab_size)


def make_masks(vocab_size, allowed):
    """Masks of the rows that `allowed` names, each with the set of tokens that it may choose."""
    bits = np.zeros((len(allowed), 32 * -(-vocab_size // 32)), dtype=np.uint8)
    for row, tokens in enumerate(allowed.values()):
        bits[row, list(tokens)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(torch.tensor(list(allowed), dtype=torch.int32), torch.from_numpy(words))


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 200])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]], ids=["all", "some"])
def test_a_masked_row_is_one_whose_other_logits_are_none(vocab_size, rows):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size + 7, generator=generator)
    allowed = {row: {row, vocab_size - 1} for row in rows}
    barred = logits.clone()
    for row, tokens in allowed.items():
        others = [token for token in range(vocab_size) if token not in tokens]
        barred[row, others] = -torch.inf
    columns = {"temperature": [0.0, 1.0, 1.0, 0.5], "uniform": [0.1, 0.7, 0.9, 0.4]}
    columns["top_k"] = [0, 0, 3, 0]
    plain = make_batch(4, num_logprobs=2, **columns)
    given = logits.clone()
    expected = sample(barred, plain, vocab_size)
    output = sample(given, replace(plain, masks=make_masks(vocab_size, allowed)), vocab_size)
    assert output.sampled.tolist() == expected.sampled.tolist()
    assert all(int(output.sampled[row]) in tokens for row, tokens in allowed.items())
    assert torch.equal(given, logits)
    # Log probabilities are the model's own.
    own = logits[:, :vocab_size].log_softmax(-1).gather(1, output.sampled.long().unsqueeze(1))
    torch.testing.assert_close(output.logprob, own.squeeze(1))


def test_a_mask_comes_after_the_edits():
    logits = torch.zeros(2, 8)
    edits = [(0, 3, 1.0, 9.0), (0, 4, 1.0, 1.0), (1, 3, 1.0, 9.0)]
    batch = make_batch(2, edits, temperature=0.0)
    batch = replace(batch, masks=make_masks(8, {0: {4, 5}}))
    assert sample(logits, batch).sampled.tolist() == [4, 3]
    assert logits.abs().max() == 0


def test_a_masked_row_with_nothing_finite_among_the_allowed_is_reported():
    logits = torch.zeros(2, 8)
    logits[0, 2] = torch.nan
    batch = replace(make_batch(2), masks=make_masks(8, {0: {2, 3}}))
    assert sample(logits, batch).bad.tolist() == [True, False]


def random_batch(generator, rows, vocab_size):
    """Rows with parameters of every kind, some of them edited, some masked."""
    choose = torch.Generator().manual_seed(int(torch.randint(1 << 30, (1,), generator=generator)))

    def pick(*values):
        return [values[i] for i in torch.randint(len(values), (rows,), generator=choose).tolist()]

    tokens = torch.randperm(vocab_size, generator=choose)[:5].tolist()
    edits = [
        (row, token, repetition, bias)
        for row in range(0, rows, 3)
        for token, repetition, bias in zip(
            tokens, (1.3, 1.0, 0.7, 2.0, 1.0), (0.0, 4.0, -1.0, 0.5, -INF), strict=False
        )
    ]
    batch = make_batch(
        rows,
        edits,
        num_logprobs=7,
        temperature=pick(0.0, 0.2, 0.9, 1.0, 3.0),
        top_k=pick(0, 0, 1, 4, 50, 700),
        top_p=pick(1.0, 1.0, 0.95, 0.4),
        min_p=pick(0.0, 0.0, 0.02, 0.3),
        uniform=torch.rand(rows, generator=choose),
    )
    share = 0.02 if vocab_size > 500 else 0.5
    allowed = {
        row: {0, *(torch.rand(vocab_size, generator=choose) < share).nonzero().flatten().tolist()}
        for row in range(1, rows, 2)
    }
    return replace(batch, masks=make_masks(vocab_size, allowed))


@pytest.mark.parametrize("vocab_size", [5, 64, 95, 1003, 49_152])
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_the_sampler_for_cpus_is_the_one_for_all_devices(vocab_size, spread):
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(8):
        batch = random_batch(generator, 24, vocab_size)
        logits = torch.randn(24, vocab_size + 3, generator=generator) * spread
        logits[4, vocab_size // 2] = math.nan
        logits[7] = -INF
        given = logits.clone()
        here = sample(logits, batch, vocab_size)
        torch.testing.assert_close(logits, given, rtol=0, atol=0, equal_nan=True)
        other = sample_with_torch(logits, batch, vocab_size)
        assert torch.equal(here.sampled, other.sampled)
        assert torch.equal(here.bad, other.bad)
        assert here.sampled[4] == -1
        good = ~here.bad
        assert torch.equal(here.rank[good], other.rank[good])
        assert torch.equal(here.top_ids[good], other.top_ids[good])
        for name in ("logprob", "top_logprobs"):
            mine, theirs = getattr(here, name)[good], getattr(other, name)[good]
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edits": [(2, 0, 1.0, 0.0)]}, "the row of an edit 2 is not below 2"),
        ({"edits": [(0, -1, 1.0, 0.0)]}, "the token of an edit -1 is not below 40"),
        ({"edits": [(1, 40, 1.0, 0.0)]}, "the token of an edit 40 is not below 40"),
    ],
)
def test_what_does_not_exist_is_refused_by_the_sampler_for_cpus(change, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(2, 40), make_batch(2, **change))


def test_masks_of_another_size_are_refused_by_the_sampler_for_cpus():
    masks = make_masks(40, {1: {3}})
    batch = make_batch(2)
    for rows, bits, message in (
        (torch.tensor([2], dtype=torch.int32), masks.bits, "the row of a mask 2 is not below 2"),
        (masks.rows, masks.bits[:, :1].contiguous(), "a mask has 1 elements, expected 2"),
        (masks.rows, masks.bits.long(), "the bits of masks must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(torch.zeros(2, 40), replace(batch, masks=TokenMasks(rows, bits)))
