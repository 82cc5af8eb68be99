//! New keys and values into the cache, queries and keys rotated on the way.
#![expect(
    unsafe_code,
    reason = "rows and the cache are read and written through vectors"
)]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::AttentionError;
use super::cache::LayerCache;
use super::element::{Element, by_element};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::rows;
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch};

/// The new tokens of a step.
pub struct NewTokens<'a> {
    /// For each token: queries, keys and values, head by head. Queries and keys are rotated in place.
    pub heads: &'a mut [f32],
    /// Query heads.
    pub query_heads: usize,
    /// [positions, head size]: cosines, then sines (Su et al., `RoFormer`, 2021).
    pub rotary_table: &'a [f32],
    /// Each token's position: its row of the table.
    pub positions: &'a [i32],
    /// Each token's slot.
    pub slots: &'a [i64],
    /// `RMSNorm` of each query and key head first: a weight for each element of those heads, or empty.
    pub norm: &'a [f32],
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Norms and rotates queries and keys, and stores keys and values.
pub fn write(
    isa: Isa,
    pool: &Pool,
    cache: &LayerCache,
    tokens: &mut NewTokens<'_>,
) -> Result<(), AttentionError> {
    check(cache, tokens)?;
    let kernel = by_element!(cache.element(), |E| dispatch_token::<E>(isa));
    let count = tokens.positions.len();
    let width = (tokens.query_heads + 2 * cache.heads()) * cache.head_dim();
    let heads = SharedMut::new(tokens.heads);
    let (table, norm) = (tokens.rotary_table, tokens.norm);
    rows::share(pool, count, width, &|token| {
        let position = tokens.positions[token] as usize;
        let job = TokenJob {
            cache,
            query_heads: tokens.query_heads,
            turn: &table[position * cache.head_dim()..][..cache.head_dim()],
            slot: tokens.slots[token] as usize,
            norm,
            epsilon: tokens.epsilon,
        };
        // SAFETY: the instructions of `isa` are there; position and slot were checked.
        unsafe { kernel(heads.part(token * width, width), &job) };
    });
    Ok(())
}

fn check(cache: &LayerCache, tokens: &NewTokens<'_>) -> Result<(), AttentionError> {
    let (count, head_dim) = (tokens.positions.len(), cache.head_dim());
    let rotated = (tokens.query_heads + cache.heads()) * head_dim;
    let lengths = [
        ("slot_mapping", tokens.slots.len(), count),
        (
            "heads",
            tokens.heads.len(),
            count * (rotated + cache.heads() * head_dim),
        ),
        (
            "the head norm",
            tokens.norm.len(),
            if tokens.norm.is_empty() { 0 } else { rotated },
        ),
    ];
    for (what, got, expected) in lengths {
        if got != expected {
            return Err(AttentionError::Length {
                what,
                got,
                expected,
            });
        }
    }
    let positions = tokens.rotary_table.len() / head_dim;
    for position in tokens.positions {
        in_range("position", i64::from(*position), positions)?;
    }
    for slot in tokens.slots {
        in_range("slot", *slot, cache.slots())?;
    }
    Ok(())
}

fn in_range(what: &'static str, got: i64, limit: usize) -> Result<(), AttentionError> {
    if usize::try_from(got).is_ok_and(|got| got < limit) {
        return Ok(());
    }
    Err(AttentionError::OutOfCache { what, got, limit })
}

struct TokenJob<'a> {
    cache: &'a LayerCache,
    query_heads: usize,
    turn: &'a [f32],
    slot: usize,
    norm: &'a [f32],
    epsilon: f32,
}

type TokenKernel = unsafe fn(&mut [f32], &TokenJob<'_>);

fn dispatch_token<E: Element>(isa: Isa) -> TokenKernel {
    dispatch!(isa, write_token<E>(heads: &mut [f32], job: &TokenJob<'_>))
}

#[inline(always)]
unsafe fn write_token<V: Vector, E: Element>(heads: &mut [f32], job: &TokenJob<'_>) {
    let (cache, size) = (job.cache, job.cache.head_dim());
    let rotated = (job.query_heads + cache.heads()) * size;
    // SAFETY: the caller's promise; heads have `size` elements and the slot is in the cache.
    unsafe {
        for (index, head) in heads[..rotated].chunks_exact_mut(size).enumerate() {
            if !job.norm.is_empty() {
                norm_head::<V>(head, &job.norm[index * size..][..size], job.epsilon);
            }
            rotate::<V>(head, job.turn);
        }
        let keys = heads[job.query_heads * size..].chunks_exact(size);
        for (index, head) in keys.enumerate() {
            let (part, number) = (index / cache.heads(), index % cache.heads());
            let place = cache.place(job.slot, number);
            let scale_place = job.slot * cache.heads() + number;
            let (elements, scales) = if part == 0 {
                (cache.keys, cache.key_scales)
            } else {
                (cache.values, cache.value_scales)
            };
            let scale = if E::IS_SCALED {
                head_scale::<V>(head)
            } else {
                1.0
            };
            if E::IS_SCALED {
                scales.add(scale_place).write(scale);
            }
            store_head::<V, E>(head, scale, elements.cast::<E>().add(place));
        }
    }
}

#[inline(always)]
unsafe fn norm_head<V: Vector>(head: &mut [f32], weight: &[f32], epsilon: f32) {
    // SAFETY: the caller's promise; vectors end where the head does.
    unsafe {
        let mut squares = V::splat(0.0);
        for start in (0..head.len()).step_by(LANES) {
            let part = rows::load::<V>(head, start);
            squares = part.fma(part, squares);
        }
        let mean = squares.sum() / head.len() as f32;
        let factor = V::splat(1.0 / (mean + epsilon).sqrt());
        for start in (0..head.len()).step_by(LANES) {
            let part = rows::load::<V>(head, start).mul(factor);
            rows::store(part.mul(rows::load::<V>(weight, start)), head, start);
        }
    }
}

/// The halves (a, b) become (a cos - b sin, b cos + a sin).
#[inline(always)]
unsafe fn rotate<V: Vector>(head: &mut [f32], turn: &[f32]) {
    let half = head.len() / 2;
    let (first, second) = head.split_at_mut(half);
    let (cosines, sines) = turn.split_at(half);
    // SAFETY: the caller's promise; vectors end where the halves do.
    unsafe {
        for start in (0..half).step_by(LANES) {
            let (a, b) = (
                rows::load::<V>(first, start),
                rows::load::<V>(second, start),
            );
            let (cosine, sine) = (
                rows::load::<V>(cosines, start),
                rows::load::<V>(sines, start),
            );
            rows::store(a.mul(cosine).sub(b.mul(sine)), first, start);
            rows::store(b.mul(cosine).add(a.mul(sine)), second, start);
        }
    }
}

/// What the head's largest element, as 127, is worth.
#[inline(always)]
unsafe fn head_scale<V: Vector>(head: &[f32]) -> f32 {
    // SAFETY: the caller's promise; vectors end where the head does.
    unsafe {
        let mut largest = V::splat(0.0);
        let mut probe = V::splat(0.0);
        for start in (0..head.len()).step_by(LANES) {
            let part = rows::load::<V>(head, start);
            largest = largest.max(part.abs());
            probe = probe.add(part.sub(part));
        }
        // Not a number, if an element is not finite.
        largest.largest() / 127.0 + probe.sum()
    }
}

#[inline(always)]
unsafe fn store_head<V: Vector, E: Element>(head: &[f32], scale: f32, to: *mut E) {
    // SAFETY: the caller's promise; vectors end where the head does.
    unsafe {
        let inverse = if scale > f32::MIN_POSITIVE {
            1.0 / scale
        } else {
            0.0
        };
        for start in (0..head.len()).step_by(LANES) {
            let mut part = rows::load::<V>(head, start);
            if E::IS_SCALED {
                part = part.mul(V::splat(inverse));
            }
            E::store_first(part, to.add(start), head.len() - start);
        }
    }
}
