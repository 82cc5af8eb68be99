//! Attention of many tokens of a request: tiles of queries against tiles of the context.
//!
//! A task is 32 tokens of one request and one key-value head. It walks over the context in tiles of 64
//! positions (as `FlashAttention` does): keys are transposed and values widened once for all queries of
//! the task, and the softmax is rescaled when a larger score appears.
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
use super::context::Slots;
use super::element::{Element, ElementType, by_element};
use super::{Queries, Request, first_key};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch};
use std::cell::RefCell;

/// Tokens of a task.
const TOKENS: usize = 32;

/// Positions of a tile of the context.
pub(super) const TILE: usize = 64;

/// Vectors of a tile.
pub(super) const VECTORS: usize = TILE / LANES;

/// Rows (a token's query heads are rows) at a time: with 4 vectors each they fill half of AVX-512's
/// registers.
pub(super) const ROWS: usize = 4;

pub(super) struct Task<'a> {
    pub request: Request<'a>,
    /// Its tokens, counted within the request.
    first: usize,
    tokens: usize,
    pub head: usize,
}

/// Memory of one task; heads are padded to whole vectors.
#[derive(Default)]
pub(super) struct Scratch {
    /// [rows, padded]: queries.
    pub queries: Vec<f32>,
    /// [padded, TILE]: keys, transposed.
    keys: Vec<f32>,
    /// [TILE, padded]
    values: Vec<f32>,
    /// [rows, TILE]: scores, then weights.
    pub weights: Vec<f32>,
    /// [rows, padded]
    pub sums: Vec<f32>,
    /// [rows]: the largest score so far, and the sum of the weights.
    largest: Vec<f32>,
    totals: Vec<f32>,
    /// What the kernel for pairs of bfloat16 has in place of queries, keys and values.
    #[cfg(target_arch = "x86_64")]
    pub pairs: super::prefill_bf16::Pairs,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Attends all tokens of the requests.
pub(crate) fn attend(
    isa: Isa,
    pool: &Pool,
    cache: &LayerCache,
    queries: &Queries<'_>,
    requests: &[Request<'_>],
    out: &mut [f32],
) {
    let kernel = kernel(isa, cache.element());
    let tasks = cut(cache, requests);
    let (heads, size) = (queries.heads, cache.head_dim());
    let group = heads / cache.heads();
    let results = SharedMut::new(out);
    pool.run(tasks.len(), &|index| {
        let task = &tasks[index];
        SCRATCH.with_borrow_mut(|scratch| {
            let job = TaskJob {
                cache,
                queries,
                task,
                group,
                padded: size.next_multiple_of(LANES),
            };
            // SAFETY: the instructions of `isa` are there; slots are in the cache.
            unsafe { kernel(&job, scratch) };
            for row in 0..task.tokens * group {
                let token = task.request.start + task.first + row / group;
                let place = (token * heads + task.head * group + row % group) * size;
                let inverse = 1.0 / scratch.totals[row];
                let sums = &scratch.sums[row * job.padded..][..size];
                for (out, sum) in results.part(place, size).iter_mut().zip(sums) {
                    *out = sum * inverse;
                }
            }
        });
    });
}

/// The longest first, so that no thread is left alone with one at the end.
fn cut<'a>(cache: &LayerCache, requests: &[Request<'a>]) -> Vec<Task<'a>> {
    let mut tasks = Vec::new();
    for request in requests {
        for first in (0..request.tokens).step_by(TOKENS) {
            for head in 0..cache.heads() {
                tasks.push(Task {
                    request: *request,
                    first,
                    tokens: TOKENS.min(request.tokens - first),
                    head,
                });
            }
        }
    }
    tasks.sort_by_key(|task| {
        let last = task.request.length - task.request.tokens + task.first + task.tokens;
        std::cmp::Reverse(last * task.tokens)
    });
    tasks
}

pub(super) struct TaskJob<'a> {
    pub cache: &'a LayerCache,
    pub queries: &'a Queries<'a>,
    pub task: &'a Task<'a>,
    group: usize,
    /// Elements of a head, padded to whole vectors.
    pub padded: usize,
}

impl TaskJob<'_> {
    pub fn rows(&self) -> usize {
        self.task.tokens * self.group
    }

    /// The position of a row's token.
    pub fn position(&self, row: usize) -> usize {
        let request = &self.task.request;
        request.length - request.tokens + self.task.first + row / self.group
    }
}

type TaskKernel = unsafe fn(&TaskJob<'_>, &mut Scratch);

/// The kernel for a cache of a type. There is one for pairs of bfloat16 where the instructions are.
fn kernel(isa: Isa, element: ElementType) -> TaskKernel {
    #[cfg(target_arch = "x86_64")]
    if element == ElementType::Bf16 && isa.multiplies_bf16() {
        return super::prefill_bf16::attend_task;
    }
    by_element!(element, |E| dispatch_task::<E>(isa))
}

fn dispatch_task<E: Element>(isa: Isa) -> TaskKernel {
    dispatch!(isa, attend_task<E>(job: &TaskJob<'_>, scratch: &mut Scratch))
}

#[inline(always)]
unsafe fn attend_task<V: Vector, E: Element>(job: &TaskJob<'_>, scratch: &mut Scratch) {
    let rows = job.rows();
    start(job, scratch);
    let end = job.position(rows - 1) + 1;
    let mut first = first_key(job.position(0), job.queries.window);
    while first < end {
        let stop = (first + TILE).min(end);
        let slots = Slots::new(job.cache, &job.task.request, first, stop);
        // SAFETY: the caller's promise.
        unsafe {
            load_tile::<V, E>(job, slots.get(), scratch);
            for row in (0..rows).step_by(ROWS) {
                match rows - row {
                    1 => attend_rows::<V, 1>(job, scratch, row, first),
                    2 => attend_rows::<V, 2>(job, scratch, row, first),
                    3 => attend_rows::<V, 3>(job, scratch, row, first),
                    _ => attend_rows::<V, ROWS>(job, scratch, row, first),
                }
            }
        }
        first = stop;
    }
}

/// Queries, scaled, in rows; nothing attended yet.
#[inline(always)]
pub(super) fn start(job: &TaskJob<'_>, scratch: &mut Scratch) {
    let (rows, padded, size) = (job.rows(), job.padded, job.cache.head_dim());
    let factor = 1.0 / (size as f32).sqrt();
    for (buffer, length) in [
        (&mut scratch.queries, rows * padded),
        (&mut scratch.keys, padded * TILE),
        (&mut scratch.values, TILE * padded),
        (&mut scratch.weights, rows * TILE),
        (&mut scratch.sums, rows * padded),
        (&mut scratch.totals, rows),
    ] {
        buffer.clear();
        buffer.resize(length, 0.0);
    }
    scratch.largest.clear();
    scratch.largest.resize(rows, f32::NEG_INFINITY);
    for row in 0..rows {
        let token = job.task.request.start + job.task.first + row / job.group;
        let head = job.task.head * job.group + row % job.group;
        let query = &job.queries.query[token * job.queries.stride + head * size..][..size];
        for (to, from) in scratch.queries[row * padded..].iter_mut().zip(query) {
            *to = from * factor;
        }
    }
}

/// Keys, transposed, and values of a tile. What lies past its end is never read as a number: its
/// weights are 0, and its values are those of an earlier tile.
#[inline(always)]
unsafe fn load_tile<V: Vector, E: Element>(
    job: &TaskJob<'_>,
    slots: &[usize],
    scratch: &mut Scratch,
) {
    let (cache, padded, size) = (job.cache, job.padded, job.cache.head_dim());
    // SAFETY: the caller's promise: slots are in the cache; buffers are padded.
    unsafe {
        for (index, slot) in slots.iter().enumerate() {
            let place = cache.place(*slot, job.task.head);
            let scale_place = slot * cache.heads() + job.task.head;
            let (mut key_scale, mut value_scale) = (V::splat(1.0), V::splat(1.0));
            if E::IS_SCALED {
                key_scale = V::splat(*cache.key_scales.add(scale_place));
                value_scale = V::splat(*cache.value_scales.add(scale_place));
            }
            let keys = cache.keys.cast::<E>().cast_const().add(place);
            let values = cache.values.cast::<E>().cast_const().add(place);
            for column in (0..size).step_by(LANES) {
                let mut key = E::load_first::<V>(keys.add(column), size - column);
                let mut value = E::load_first::<V>(values.add(column), size - column);
                if E::IS_SCALED {
                    (key, value) = (key.mul(key_scale), value.mul(value_scale));
                }
                value.store(scratch.values[index * padded + column..].as_mut_ptr());
                for (lane, element) in key.to_array().into_iter().enumerate() {
                    *scratch
                        .keys
                        .get_unchecked_mut((column + lane) * TILE + index) = element;
                }
            }
        }
    }
}

/// Attends COUNT rows to one tile whose first position is `first`.
#[inline(always)]
unsafe fn attend_rows<V: Vector, const COUNT: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    row: usize,
    first: usize,
) {
    // SAFETY: the caller's promise; buffers are padded to whole vectors.
    unsafe {
        score_rows::<V, COUNT>(job, scratch, row);
        let mut factors = [0.0; COUNT];
        for (index, factor) in factors.iter_mut().enumerate() {
            *factor = weigh::<V>(job, scratch, row + index, first);
        }
        let mut column = 0;
        while column + VECTORS * LANES <= job.padded {
            add_values::<V, COUNT, VECTORS>(job, scratch, row, column, &factors);
            column += VECTORS * LANES;
        }
        while column < job.padded {
            add_values::<V, COUNT, 1>(job, scratch, row, column, &factors);
            column += LANES;
        }
    }
}

#[inline(always)]
unsafe fn score_rows<V: Vector, const COUNT: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    row: usize,
) {
    let queries = scratch.queries[row * job.padded..][..COUNT * job.padded].as_ptr();
    let keys = scratch.keys.as_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); VECTORS]; COUNT];
        for column in 0..job.cache.head_dim() {
            let mut key = [V::splat(0.0); VECTORS];
            for vector in 0..VECTORS {
                key[vector] = V::load(keys.add(column * TILE + vector * LANES));
            }
            for index in 0..COUNT {
                let query = V::splat(*queries.add(index * job.padded + column));
                for vector in 0..VECTORS {
                    sums[index][vector] = query.fma(key[vector], sums[index][vector]);
                }
            }
        }
        let weights = scratch.weights[row * TILE..][..COUNT * TILE].as_mut_ptr();
        for index in 0..COUNT {
            for vector in 0..VECTORS {
                sums[index][vector].store(weights.add(index * TILE + vector * LANES));
            }
        }
    }
}

/// A row's scores to weights; what its earlier sums must be multiplied by.
#[inline(always)]
pub(super) unsafe fn weigh<V: Vector>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    row: usize,
    first: usize,
) -> f32 {
    let position = job.position(row);
    let weights = &mut scratch.weights[row * TILE..][..TILE];
    let begin = first_key(position, job.queries.window)
        .saturating_sub(first)
        .min(TILE);
    let end = (position + 1).saturating_sub(first).min(TILE);
    weights[..begin].fill(f32::NEG_INFINITY);
    weights[end.max(begin)..].fill(f32::NEG_INFINITY);
    // SAFETY: the caller's promise; a tile is whole vectors.
    unsafe {
        let mut largest = V::splat(f32::NEG_INFINITY);
        for start in (0..TILE).step_by(LANES) {
            largest = V::load(weights[start..].as_ptr()).max(largest);
        }
        let before = scratch.largest[row];
        let largest = before.max(largest.largest());
        if largest == f32::NEG_INFINITY {
            // Nothing of what the row sees has come yet.
            weights.fill(0.0);
            return 1.0;
        }
        let shift = V::splat(largest);
        let mut sum = V::splat(0.0);
        for start in (0..TILE).step_by(LANES) {
            let weight = V::load(weights[start..].as_ptr()).sub(shift).exp();
            sum = sum.add(weight);
            weight.store(weights[start..].as_mut_ptr());
        }
        let factor = (before - largest).exp();
        scratch.largest[row] = largest;
        scratch.totals[row] = scratch.totals[row] * factor + sum.sum();
        factor
    }
}

#[inline(always)]
unsafe fn add_values<V: Vector, const COUNT: usize, const WIDE: usize>(
    job: &TaskJob<'_>,
    scratch: &mut Scratch,
    row: usize,
    column: usize,
    factors: &[f32; COUNT],
) {
    let weights = scratch.weights[row * TILE..][..COUNT * TILE].as_ptr();
    let values = scratch.values[column..].as_ptr();
    let sums_at = scratch.sums[row * job.padded..][..COUNT * job.padded].as_mut_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); WIDE]; COUNT];
        for index in 0..COUNT {
            let factor = V::splat(factors[index]);
            for vector in 0..WIDE {
                let from = sums_at.add(index * job.padded + column + vector * LANES);
                sums[index][vector] = V::load(from).mul(factor);
            }
        }
        for position in 0..TILE {
            let mut parts = [V::splat(0.0); WIDE];
            for vector in 0..WIDE {
                parts[vector] = V::load(values.add(position * job.padded + vector * LANES));
            }
            for index in 0..COUNT {
                let weight = V::splat(*weights.add(index * TILE + position));
                for vector in 0..WIDE {
                    sums[index][vector] = weight.fma(parts[vector], sums[index][vector]);
                }
            }
        }
        for index in 0..COUNT {
            for vector in 0..WIDE {
                let to = sums_at.add(index * job.padded + column + vector * LANES);
                sums[index][vector].store(to);
            }
        }
    }
}
