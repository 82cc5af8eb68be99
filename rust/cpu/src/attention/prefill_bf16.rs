//! Attention of many tokens over a cache of bfloat16, with VDPBF16PS.
//!
//! As in [`prefill`](super::prefill), but queries and weights are rounded to bfloat16 and multiplied in
//! pairs: two elements of a head for scores, two positions for values. Sums and softmax stay float32.
#![expect(unsafe_code, reason = "intrinsics over raw memory")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use super::context::Slots;
use super::first_key;
use super::prefill::{ROWS, Scratch, TILE, TaskJob, VECTORS, start, weigh};
use crate::simd::avx512::Avx512;
use crate::simd::{LANES, Vector};
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm256_maskz_loadu_epi16, _mm512_cvtepu16_epi32, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512,
};
use std::mem::transmute;

/// Pairs of bfloat16 of one task.
#[derive(Default)]
pub(super) struct Pairs {
    /// [rows, padded / 2]: queries.
    queries: Vec<u32>,
    /// [padded / 2, TILE]: keys, transposed.
    keys: Vec<u32>,
    /// [TILE / 2, padded]: values of two positions.
    values: Vec<u32>,
    /// [ROWS, TILE / 2]: weights of two positions.
    weights: [[u32; TILE / 2]; ROWS],
}

/// Attends all rows of a task.
///
/// # Safety
///
/// The instructions must be there, and the slots of the task's request in a cache of bfloat16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
pub(super) unsafe fn attend_task(job: &TaskJob<'_>, scratch: &mut Scratch) {
    let rows = job.rows();
    start(job, scratch);
    let mut pairs = std::mem::take(&mut scratch.pairs);
    let end = job.position(rows - 1) + 1;
    let mut first = first_key(job.position(0), job.queries.window);
    // SAFETY: the caller's promise; buffers are padded to whole vectors.
    unsafe {
        pairs.start(job, scratch);
        while first < end {
            let stop = (first + TILE).min(end);
            let slots = Slots::new(job.cache, &job.task.request, first, stop);
            pairs.load_tile(job, slots.get());
            for row in (0..rows).step_by(ROWS) {
                match rows - row {
                    1 => attend_rows::<1>(job, scratch, &mut pairs, row, first),
                    2 => attend_rows::<2>(job, scratch, &mut pairs, row, first),
                    3 => attend_rows::<3>(job, scratch, &mut pairs, row, first),
                    _ => attend_rows::<ROWS>(job, scratch, &mut pairs, row, first),
                }
            }
            first = stop;
        }
    }
    scratch.pairs = pairs;
}

impl Pairs {
    /// Queries, rounded; keys and values of nothing yet.
    #[inline(always)]
    unsafe fn start(&mut self, job: &TaskJob<'_>, scratch: &Scratch) {
        for (buffer, length) in [
            (&mut self.queries, job.rows() * job.padded / 2),
            (&mut self.keys, job.padded / 2 * TILE),
            (&mut self.values, TILE / 2 * job.padded),
        ] {
            buffer.clear();
            buffer.resize(length, 0);
        }
        // SAFETY: rows are whole vectors.
        unsafe {
            for start in (0..job.rows() * job.padded).step_by(LANES) {
                let part = Avx512::load(scratch.queries[start..][..LANES].as_ptr());
                part.store_bf16(self.queries[start / 2..][..LANES / 2].as_mut_ptr().cast());
            }
        }
    }

    /// Keys and values of a tile. What lies past its end is never read as a number: its weights are 0, and
    /// its values are those of an earlier tile, or 0 beside the last position.
    #[inline(always)]
    unsafe fn load_tile(&mut self, job: &TaskJob<'_>, slots: &[usize]) {
        let (cache, padded, size) = (job.cache, job.padded, job.cache.head_dim());
        // SAFETY: the caller's promise: slots are in the cache; buffers are padded.
        unsafe {
            for (index, slot) in slots.iter().enumerate() {
                let place = cache.place(*slot, job.task.head);
                let key = cache.keys.cast_const().add(2 * place);
                for pair in 0..size / 2 {
                    let word = key.add(4 * pair).cast::<u32>().read_unaligned();
                    *self.keys.get_unchecked_mut(pair * TILE + index) = word;
                }
                if size % 2 == 1 {
                    let last = key.add(2 * (size - 1)).cast::<u16>().read_unaligned();
                    self.keys[size / 2 * TILE + index] = u32::from(last);
                }
            }
            for (slots, to) in slots.chunks(2).zip(self.values.chunks_exact_mut(padded)) {
                for column in (0..size).step_by(LANES) {
                    let count = LANES.min(size - column);
                    let at = |slot: usize| {
                        let place = cache.place(slot, job.task.head) + column;
                        cache.values.cast_const().wrapping_add(2 * place)
                    };
                    let first = widen(at(slots[0]), count);
                    let second = match slots.get(1) {
                        Some(slot) => _mm512_slli_epi32::<16>(widen(at(*slot), count)),
                        None => _mm512_setzero_si512(),
                    };
                    let pairs = _mm512_or_si512(first, second);
                    _mm512_storeu_si512(to[column..][..LANES].as_mut_ptr().cast(), pairs);
                }
            }
        }
    }
}

/// Up to 16 numbers of 16 bits as numbers of 32.
#[inline(always)]
unsafe fn widen(from: *const u8, count: usize) -> __m512i {
    let mask = ((1_u32 << count) - 1) as u16;
    // SAFETY: the caller's promise: `count` numbers lie there.
    unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast())) }
}

/// `sum` and the products of a pair, the same in all lanes, with 16 pairs.
#[inline(always)]
unsafe fn dot(sum: __m512, pair: u32, pairs: __m512i) -> __m512 {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        let pair = _mm512_set1_epi32(pair as i32);
        _mm512_dpbf16_ps(
            sum,
            transmute::<__m512i, __m512bh>(pair),
            transmute::<__m512i, __m512bh>(pairs),
        )
    }
}

/// Attends COUNT rows to one tile whose first position is `first`.
#[inline(always)]
unsafe fn attend_rows<const COUNT: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    pairs: &mut Pairs,
    row: usize,
    first: usize,
) {
    // SAFETY: the caller's promise; buffers are padded to whole vectors.
    unsafe {
        score_rows::<COUNT>(job, scratch, pairs, row);
        let mut factors = [0.0; COUNT];
        for index in 0..COUNT {
            factors[index] = weigh::<Avx512>(job, scratch, row + index, first);
            let weights = &scratch.weights[(row + index) * TILE..][..TILE];
            for start in (0..TILE).step_by(LANES) {
                let part = Avx512::load(weights[start..].as_ptr());
                part.store_bf16(pairs.weights[index][start / 2..].as_mut_ptr().cast());
            }
        }
        let mut column = 0;
        while column + VECTORS * LANES <= job.padded {
            add_values::<COUNT, VECTORS>(job, scratch, pairs, row, column, &factors);
            column += VECTORS * LANES;
        }
        while column < job.padded {
            add_values::<COUNT, 1>(job, scratch, pairs, row, column, &factors);
            column += LANES;
        }
    }
}

#[inline(always)]
unsafe fn score_rows<const COUNT: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    pairs: &Pairs,
    row: usize,
) {
    let half = job.padded / 2;
    let queries = pairs.queries[row * half..][..COUNT * half].as_ptr();
    let keys = pairs.keys.as_ptr();
    let weights = scratch.weights[row * TILE..][..COUNT * TILE].as_mut_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; COUNT];
        for pair in 0..job.cache.head_dim().div_ceil(2) {
            let mut key = [_mm512_setzero_si512(); VECTORS];
            for vector in 0..VECTORS {
                key[vector] = _mm512_loadu_si512(keys.add(pair * TILE + vector * LANES).cast());
            }
            for index in 0..COUNT {
                let query = *queries.add(index * half + pair);
                for vector in 0..VECTORS {
                    sums[index][vector] = dot(sums[index][vector], query, key[vector]);
                }
            }
        }
        for index in 0..COUNT {
            for vector in 0..VECTORS {
                let to = weights.add(index * TILE + vector * LANES);
                _mm512_storeu_ps(to, sums[index][vector]);
            }
        }
    }
}

#[inline(always)]
unsafe fn add_values<const COUNT: usize, const WIDE: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    pairs: &Pairs,
    row: usize,
    column: usize,
    factors: &[f32; COUNT],
) {
    let values = pairs.values[column..].as_ptr();
    let sums_at = scratch.sums[row * job.padded..][..COUNT * job.padded].as_mut_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); WIDE]; COUNT];
        for index in 0..COUNT {
            for vector in 0..WIDE {
                let from = sums_at.add(index * job.padded + column + vector * LANES);
                let factor = _mm512_set1_ps(factors[index]);
                sums[index][vector] = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
            }
        }
        for pair in 0..TILE / 2 {
            let mut parts = [_mm512_setzero_si512(); WIDE];
            for vector in 0..WIDE {
                let from = values.add(pair * job.padded + vector * LANES);
                parts[vector] = _mm512_loadu_si512(from.cast());
            }
            for index in 0..COUNT {
                let weight = pairs.weights[index][pair];
                for vector in 0..WIDE {
                    sums[index][vector] = dot(sums[index][vector], weight, parts[vector]);
                }
            }
        }
        for index in 0..COUNT {
            for vector in 0..WIDE {
                let to = sums_at.add(index * job.padded + column + vector * LANES);
                _mm512_storeu_ps(to, sums[index][vector]);
            }
        }
    }
}
