"""Finding, in a row that is not sorted, the element where a sum over its order passes a target.

The order is by falling value, equal values by place. "The sum" counts elements or adds up their
weights. Bisecting the range of values takes a pass over the row a step, so once few elements are
left at its upper end these are packed, and passes become short.
"""

# Triton publishes no types, and the arguments of its functions are pointers and scalars of the
# device, not Python values.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_values(values, at, length):
    """float32 values of a row at `at`, [TILE]; -inf past its end."""
    return tl.load(values + at, mask=at < length, other=float("-inf")).to(tl.float32)


@triton.jit
def weights_of(numbers, peak, temperature):
    """Probabilities over that of the greatest, `peak`, a finite number; those of -inf are 0."""
    # Bounded, as the least numbers over a low temperature would not be.
    return tl.exp(tl.maximum(numbers - peak, -1e30) / temperature)


@triton.jit
def sum_closely(numbers, TILE: tl.constexpr):
    """The sum, float64, of float32 [TILE]: of 64 at a time as float32, as those are few enough."""
    return tl.sum(tl.sum(tl.reshape(numbers, (TILE // 64, 64)), axis=1).to(tl.float64), axis=0)


@triton.jit
def find_peak(values, length, TILE: tl.constexpr):
    """The greatest value, its first place, and whether the row has a NaN or infinity."""
    lane = tl.arange(0, TILE)
    greatest = tl.full([TILE], float("-inf"), tl.float32)
    place = lane
    odd = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        numbers = load_values(values, start + lane, length)
        better = numbers > greatest
        greatest = tl.where(better, numbers, greatest)
        place = tl.where(better, start + lane, place)
        # True for NaN, too.
        odd |= (~(numbers < float("inf"))).to(tl.int32)
    peak = tl.max(greatest, axis=0)
    best = tl.min(tl.where(greatest == peak, place, length), axis=0)
    return peak, best, tl.max(odd, axis=0) > 0


@triton.jit
def count_above(values, length, least, TILE: tl.constexpr):
    """How many values are greater than `least`."""
    lane = tl.arange(0, TILE)
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        count += (load_values(values, start + lane, length) > least).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def sum_weights(values, length, peak, temperature, TILE: tl.constexpr):
    """The sum of all weights, float64."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([], tl.float64)
    for start in range(0, length, TILE):
        numbers = load_values(values, start + lane, length)
        total += sum_closely(weights_of(numbers, peak, temperature), TILE)
    return total


@triton.jit
def narrow(
    values,
    length,
    low,
    high,
    least_count,
    above_count,
    above_weight,
    peak,
    temperature,
    target,
    BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    enough,
    TILE: tl.constexpr,
):
    """Bring `low` and `high`, values between which the element lies, together.

    `least_count` elements are not less than `low`, `above_*` are of those greater than `high`. The
    element is the first up to which the sum exceeds the target (STRICT), or reaches it. Ends when
    no more than `enough` elements are not less than `low`, or there is one value left. Returns the
    bounds and their sums.
    """
    lane = tl.arange(0, TILE)
    while (low < high) & (least_count > enough):
        middle = low + (high - low) * 0.5
        # Between neighbours it may round up; then the greater one is tried alone.
        middle = tl.where(middle < high, middle, low)
        count = tl.zeros([TILE], tl.int32)
        weight = tl.zeros([TILE], tl.float32)
        next_low = tl.full([TILE], float("inf"), tl.float32)
        next_high = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, length, TILE):
            at = start + lane
            numbers = tl.maximum(load_values(values, at, length), _LOWEST)
            between = (numbers <= high) & (numbers >= low) & (at < length)
            upper = between & (numbers > middle)
            count += upper.to(tl.int32)
            if not BY_COUNT:
                weight += tl.where(upper, weights_of(numbers, peak, temperature), 0.0)
            next_low = tl.where(upper, tl.minimum(next_low, numbers), next_low)
            next_high = tl.where(between & ~upper, tl.maximum(next_high, numbers), next_high)
        up_to_count = above_count + tl.sum(count, axis=0)
        up_to_weight = above_weight + sum_closely(weight, TILE)
        reached = up_to_count >= target if BY_COUNT else up_to_weight >= target
        if STRICT:
            reached = up_to_weight > target
        if reached:
            low = tl.min(next_low, axis=0)
            least_count = up_to_count
        else:
            high = tl.max(next_high, axis=0)
            above_count = up_to_count
            above_weight = up_to_weight
            # Nothing is left where rounding kept the sum below its target: take the last.
            high = tl.maximum(high, low)
    return low, high, least_count, above_count, above_weight


@triton.jit
def pack(values, ids, length, packed, to_values, to_ids, least, most_ties, TILE: tl.constexpr):
    """Move the elements greater than `least`, and the first `most_ties` equal to it, to the front.

    They stay in order. `ids` are their places in the row, which as long as it is not `packed` are
    not stored. `to_*` may be the same memory as the row. Returns how many there are.
    """
    lane = tl.arange(0, TILE)
    count = 0
    ties = 0
    for start in range(0, length, TILE):
        at = start + lane
        inside = at < length
        numbers = tl.maximum(load_values(values, at, length), _LOWEST)
        stored = tl.load(ids + at, mask=inside & packed, other=0)
        # All is read before anything is written over it.
        tl.debug_barrier()
        tie = inside & (numbers == least)
        tie_index = ties + tl.cumsum(tie.to(tl.int32), axis=0) - 1
        kept = inside & ((numbers > least) | (tie & (tie_index < most_ties)))
        place = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(to_values + place, numbers, mask=kept)
        tl.store(to_ids + place, tl.where(packed, stored, at), mask=kept)
        ties += tl.sum(tie.to(tl.int32), axis=0)
        count += tl.sum(kept.to(tl.int32), axis=0)
    # What other threads wrote is read next.
    tl.debug_barrier()
    return count


@triton.jit
def select(
    values,
    ids,
    length,
    packed,
    to_values,
    to_ids,
    low,
    high,
    least_count,
    peak,
    temperature,
    target,
    BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The value of the element looked for, and its index among those of that value.

    `low`, `high`: the least and the greatest value that it can have; `least_count` elements are not
    less than `low`. Leaves in `to_*` the elements that may come before it, and the number of them.
    """
    above_count = tl.zeros([], tl.int32)
    above_weight = tl.zeros([], tl.float64)
    # A launch compiles a length of 1 in; a branch can give another value to numbers alone.
    least_count += above_count
    low, high, least_count, above_count, above_weight = narrow(
        values, length, low, high, least_count, above_count, above_weight, peak, temperature,
        target, BY_COUNT, STRICT, TILE, TILE,
    )  # fmt: skip
    length = pack(values, ids, length, packed, to_values, to_ids, low, length, TILE)
    low, high, least_count, above_count, above_weight = narrow(
        to_values, length, low, high, least_count, above_count, above_weight, peak, temperature,
        target, BY_COUNT, STRICT, 0, TILE,
    )  # fmt: skip
    if BY_COUNT:
        index = (target - above_count).to(tl.int32) - 1
    else:
        rest = (target - above_weight) / weights_of(low, peak, temperature).to(tl.float64)
        index = tl.floor(rest).to(tl.int32) if STRICT else tl.ceil(rest).to(tl.int32) - 1
    return low, tl.maximum(tl.minimum(index, least_count - above_count - 1), 0), length
