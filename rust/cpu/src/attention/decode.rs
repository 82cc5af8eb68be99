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
use super::pieces::{Piece, cut, finish, merge};
use super::softmax::softmax;
use super::{Queries, Request};
use crate::isa::Isa;
use crate::layout::ALIGNMENT;
use crate::pool::{Pool, shares};
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch, prefetch, prefetch_far};
use std::ops::Range;

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
    let pieces = cut(queries, requests);
    // For each piece and head: the largest score, the sum, and the weighted values.
    let entry = size + 2;
    partials.resize(pieces.len() * heads * entry, 0.0);
    // A piece's heads lie side by side in memory, and are shared out only if there are few pieces.
    let together = if pieces.len() >= 4 * pool.threads() {
        cache.heads()
    } else {
        1
    };
    let step = Step {
        cache,
        queries,
        pieces: &pieces,
        together,
        partials: SharedMut::new(partials),
        results: SharedMut::new(&mut *out),
    };
    let shares = shares(pieces.len(), pool.threads());
    let per_share = cache.heads() / together;
    pool.run(shares.len() * per_share, &|task| {
        let first_head = task % per_share * together;
        // SAFETY: the instructions of `isa` are there.
        unsafe { step.attend(kernel, shares[task / per_share].clone(), first_head) };
    });
    merge(&pieces, partials, heads, size, out);
}

/// What all tasks of a call share.
struct Step<'a> {
    cache: &'a LayerCache,
    queries: &'a Queries<'a>,
    pieces: &'a [Piece<'a>],
    /// Key-value heads of a task.
    together: usize,
    /// For each piece and head: the largest score, the sum, and the weighted values.
    partials: SharedMut<'a, f32>,
    results: SharedMut<'a, f32>,
}

impl Step<'_> {
    /// Attends a share of the pieces, one after the other, for the heads of a task.
    ///
    /// # Safety
    ///
    /// The kernel's instructions must be there.
    unsafe fn attend(&self, kernel: PieceKernel, share: Range<usize>, first_head: usize) {
        let (heads, size) = (self.queries.heads, self.cache.head_dim());
        let (group, entry) = (heads / self.cache.heads(), size + 2);
        let slots_of = |index: usize| {
            let piece = &self.pieces[index];
            Slots::new(self.cache, &piece.request, piece.first, piece.end)
        };
        let mut slots = slots_of(share.start);
        for index in share.clone() {
            let piece = &self.pieces[index];
            let next = (index + 1 < share.end).then(|| slots_of(index + 1));
            for turn in 0..self.together {
                let head = first_head + turn;
                let start = piece.request.start * self.queries.stride + head * group * size;
                let job = PieceJob {
                    cache: self.cache,
                    slots: slots.get(),
                    next: next.as_ref().map_or(&[], Slots::get),
                    head,
                    turn,
                    turns: self.together,
                    query: &self.queries.query[start..][..group * size],
                };
                let place = (index * heads + head * group) * entry;
                let partial = self.partials.part(place, group * entry);
                // SAFETY: the caller's promise; slots are in the cache.
                unsafe { kernel(&job, partial) };
                if piece.is_whole {
                    let place = (piece.request.start * heads + head * group) * size;
                    for (row, from) in partial.chunks_exact(entry).enumerate() {
                        finish(from, self.results.part(place + row * size, size));
                    }
                }
            }
            if let Some(next) = next {
                slots = next;
            }
        }
    }
}

struct PieceJob<'a> {
    cache: &'a LayerCache,
    slots: &'a [usize],
    /// Those of the piece that comes next, to be fetched meanwhile.
    next: &'a [usize],
    head: usize,
    /// Which of the task's heads it is, and how many there are.
    turn: usize,
    turns: usize,
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
    let bytes = cache.head_dim() * size_of::<E>();
    for index in first..first + count {
        let ahead = slots[(index + AHEAD).min(slots.len() - 1)];
        let key = cache.place(ahead, job.head) * size_of::<E>();
        let value = cache.place(slots[index], job.head) * size_of::<E>();
        for line in (0..bytes).step_by(ALIGNMENT) {
            prefetch(cache.keys.wrapping_add(key + line));
            prefetch(cache.values.wrapping_add(value + line));
        }
        fetch_next::<E>(job, job.turn * slots.len() + index);
    }
}

/// Has a part of the next piece fetched: of a slot all heads of the task at once, since memory is fastest
/// in the order of its addresses, and all slots over the turns of the heads. `place` counts the keys that
/// the task has scored of this piece.
#[inline(always)]
fn fetch_next<E: Element>(job: &PieceJob<'_>, place: usize) {
    if place.is_multiple_of(job.turns)
        && let Some(slot) = job.next.get(place / job.turns)
    {
        let cache = job.cache;
        let start = cache.place(*slot, job.head - job.turn) * size_of::<E>();
        let bytes = job.turns * cache.head_dim() * size_of::<E>();
        for line in (start..start + bytes).step_by(ALIGNMENT) {
            prefetch_far(cache.keys.wrapping_add(line));
            prefetch_far(cache.values.wrapping_add(line));
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
