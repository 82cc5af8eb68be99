//! Attention of single tokens: the context is streamed past all query heads of a key-value head.
//!
//! A context is cut into runs of 256 positions, each attended on its own and then merged
//! (`pieces.rs`).
#![expect(unsafe_code, reason = "the cache is read through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use super::cache::LayerCache;
use super::context::{RUN, Slots};
use super::element::{Element, by_element};
use super::pieces::{cut, finish, merge};
use super::softmax::softmax;
use super::{Queries, Request};
use crate::isa::Isa;
use crate::layout::ALIGNMENT;
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch, prefetch};

/// Query heads that are attended at a time.
const ROWS: usize = 4;

/// Keys whose scores are summed up at a time, in one vector with those of `ROWS` heads.
const KEYS: usize = LANES / ROWS;

/// How many positions ahead keys are fetched.
const AHEAD: usize = 16;

/// Vectors of a head whose sums stay in registers.
const WIDE: usize = 4;

/// Attends all tokens of the requests.
pub(crate) fn attend(
    isa: Isa,
    pool: &Pool,
    cache: &LayerCache,
    queries: &Queries<'_>,
    requests: &[Request<'_>],
    partials: &mut Vec<f32>,
    out: &mut [f32],
) {
    let kernel = by_element!(cache.element(), |E| dispatch_piece::<E>(isa));
    let (heads, size) = (queries.heads, cache.head_dim());
    let group = heads / cache.heads();
    let pieces = cut(queries, requests);
    // For each piece and head: the largest score, the sum, and the weighted values.
    let entry = size + 2;
    partials.resize(pieces.len() * heads * entry, 0.0);
    let shared = SharedMut::new(partials);
    let results = SharedMut::new(&mut *out);
    // A piece's heads lie side by side in memory, and are shared out only if there are few pieces.
    let together = if pieces.len() >= 4 * pool.threads() {
        cache.heads()
    } else {
        1
    };
    let per_piece = cache.heads() / together;
    pool.run(pieces.len() * per_piece, &|task| {
        let index = task / per_piece;
        let piece = &pieces[index];
        let slots = Slots::new(cache, &piece.request, piece.first, piece.end);
        for head in (task % per_piece * together..).take(together) {
            let start = piece.token * queries.stride + head * group * size;
            let place = (index * heads + head * group) * entry;
            let job = PieceJob {
                cache,
                slots: slots.get(),
                head,
                query: &queries.query[start..][..group * size],
            };
            let partial = shared.part(place, group * entry);
            // SAFETY: the instructions of `isa` are there; slots are in the cache.
            unsafe { kernel(&job, partial) };
            if piece.is_whole {
                let place = (piece.token * heads + head * group) * size;
                for (row, from) in partial.chunks_exact(entry).enumerate() {
                    finish(from, results.part(place + row * size, size));
                }
            }
        }
    });
    merge(&pieces, partials, heads, size, out);
}

struct PieceJob<'a> {
    cache: &'a LayerCache,
    slots: &'a [usize],
    head: usize,
    /// The queries of this head's group.
    query: &'a [f32],
}

type PieceKernel = unsafe fn(&PieceJob<'_>, &mut [f32]);

fn dispatch_piece<E: Element>(isa: Isa) -> PieceKernel {
    dispatch!(isa, attend_piece<E>(job: &PieceJob<'_>, partial: &mut [f32]))
}

#[inline(always)]
unsafe fn attend_piece<V: Vector, E: Element>(job: &PieceJob<'_>, partial: &mut [f32]) {
    let size = job.cache.head_dim();
    let queries = job.query.chunks(ROWS * size);
    for (query, partial) in queries.zip(partial.chunks_mut(ROWS * (size + 2))) {
        // SAFETY: the caller's promise.
        unsafe {
            match query.len() / size {
                1 => attend_rows::<V, E, 1>(job, query, partial),
                2 => attend_rows::<V, E, 2>(job, query, partial),
                3 => attend_rows::<V, E, 3>(job, query, partial),
                _ => attend_rows::<V, E, ROWS>(job, query, partial),
            }
        }
    }
}

#[inline(always)]
unsafe fn attend_rows<V: Vector, E: Element, const COUNT: usize>(
    job: &PieceJob<'_>,
    query: &[f32],
    partial: &mut [f32],
) {
    let (cache, size) = (job.cache, job.cache.head_dim());
    let slots = job.slots;
    let mut weights = [[0.0_f32; RUN]; COUNT];
    // SAFETY: the caller's promise: slots are in the cache.
    unsafe {
        let mut first = 0;
        while first + KEYS <= slots.len() {
            score::<V, E, COUNT, KEYS>(job, query, first, &mut weights);
            first += KEYS;
        }
        for index in first..slots.len() {
            score::<V, E, COUNT, 1>(job, query, index, &mut weights);
        }
        let factor = 1.0 / (size as f32).sqrt();
        for (weights, partial) in weights.iter_mut().zip(partial.chunks_exact_mut(size + 2)) {
            let (largest, sum) = softmax::<V>(&mut weights[..slots.len()], factor);
            (partial[0], partial[1]) = (largest, sum);
        }
        if E::IS_SCALED {
            for (index, slot) in slots.iter().enumerate() {
                let scale = scale::<E>(cache.value_scales, cache, *slot, job.head);
                for row in 0..COUNT {
                    weights[row][index] *= scale;
                }
            }
        }
        let mut column = 0;
        while column + WIDE * LANES <= size {
            add_values::<V, E, COUNT, WIDE>(job, &weights, column, partial);
            column += WIDE * LANES;
        }
        while column < size {
            add_values::<V, E, COUNT, 1>(job, &weights, column, partial);
            column += LANES;
        }
    }
}

/// The scale of a token's head, or 1.
#[inline(always)]
unsafe fn scale<E: Element>(
    scales: *const f32,
    cache: &LayerCache,
    slot: usize,
    head: usize,
) -> f32 {
    if E::IS_SCALED {
        // SAFETY: the caller's promise: the slot is in the cache.
        unsafe { *scales.add(slot * cache.heads() + head) }
    } else {
        1.0
    }
}

/// The products of COUNT queries and of the MANY keys from `first` on, into `scores`.
#[inline(always)]
unsafe fn score<V: Vector, E: Element, const COUNT: usize, const MANY: usize>(
    job: &PieceJob<'_>,
    query: &[f32],
    first: usize,
    scores: &mut [[f32; RUN]; COUNT],
) {
    let (cache, size) = (job.cache, job.cache.head_dim());
    let slots = &job.slots[first..][..MANY];
    // SAFETY: the caller's promise; vectors end where the head does.
    unsafe {
        fetch_ahead::<E>(job, first, MANY);
        let query = query.as_ptr();
        let mut keys = [std::ptr::null(); MANY];
        for index in 0..MANY {
            let place = cache.place(slots[index], job.head);
            keys[index] = cache.keys.cast::<E>().cast_const().add(place);
        }
        let mut sums = [V::splat(0.0); LANES];
        let mut start = 0;
        while start + LANES <= size {
            for index in 0..MANY {
                let key = E::load::<V>(keys[index].add(start));
                for row in 0..COUNT {
                    let place = row * KEYS + index;
                    sums[place] = V::load(query.add(row * size + start)).fma(key, sums[place]);
                }
            }
            start += LANES;
        }
        if start < size {
            for index in 0..MANY {
                let key = E::load_first::<V>(keys[index].add(start), size - start);
                for row in 0..COUNT {
                    let query = V::load_first(query.add(row * size + start), size - start);
                    let place = row * KEYS + index;
                    sums[place] = query.fma(key, sums[place]);
                }
            }
        }
        let sums = V::sums(sums).to_array();
        for index in 0..MANY {
            let scale = scale::<E>(cache.key_scales, cache, slots[index], job.head);
            for row in 0..COUNT {
                scores[row][first + index] = sums[row * KEYS + index] * scale;
            }
        }
    }
}

/// Has the keys some way ahead of `first` fetched, and its values, which are read next.
#[inline(always)]
fn fetch_ahead<E: Element>(job: &PieceJob<'_>, first: usize, count: usize) {
    let (cache, slots) = (job.cache, job.slots);
    let lines = (cache.head_dim() * size_of::<E>()).div_ceil(ALIGNMENT);
    for index in first..first + count {
        let key = cache.place(slots[(index + AHEAD).min(slots.len() - 1)], job.head);
        let value = cache.place(slots[index], job.head);
        for line in 0..lines {
            prefetch(
                cache
                    .keys
                    .cast::<E>()
                    .wrapping_add(key)
                    .wrapping_byte_add(line * ALIGNMENT),
            );
            prefetch(
                cache
                    .values
                    .cast::<E>()
                    .wrapping_add(value)
                    .wrapping_byte_add(line * ALIGNMENT),
            );
        }
    }
}

#[inline(always)]
unsafe fn add_values<V: Vector, E: Element, const COUNT: usize, const VECTORS: usize>(
    job: &PieceJob<'_>,
    weights: &[[f32; RUN]; COUNT],
    column: usize,
    partial: &mut [f32],
) {
    let (cache, size) = (job.cache, job.cache.head_dim());
    // SAFETY: the caller's promise; vectors end where the head does.
    unsafe {
        let values = cache.values.cast::<E>().cast_const();
        let mut sums = [[V::splat(0.0); VECTORS]; COUNT];
        for (index, slot) in job.slots.iter().enumerate() {
            let value = values.add(cache.place(*slot, job.head) + column);
            let mut parts = [V::splat(0.0); VECTORS];
            for vector in 0..VECTORS {
                let start = vector * LANES;
                parts[vector] = if VECTORS == WIDE {
                    E::load(value.add(start))
                } else {
                    E::load_first(value.add(start), size - column - start)
                };
            }
            for row in 0..COUNT {
                let weight = V::splat(weights[row][index]);
                for vector in 0..VECTORS {
                    sums[row][vector] = weight.fma(parts[vector], sums[row][vector]);
                }
            }
        }
        for (sums, partial) in sums.into_iter().zip(partial.chunks_exact_mut(size + 2)) {
            for (vector, sum) in sums.into_iter().enumerate() {
                crate::rows::store(sum, &mut partial[2..], column + vector * LANES);
            }
        }
    }
}
