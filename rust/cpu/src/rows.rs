//! What is done to one row at a time.
#![expect(unsafe_code, reason = "rows are read and written through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{LANES, Vector, dispatch};

/// Below so many elements, sharing them out takes longer than doing them.
const SHARE_FROM: usize = 16_384;

/// Calls `run` for each row, on several threads if that pays.
pub fn share(pool: &Pool, rows: usize, columns: usize, run: &(dyn Fn(usize) + Sync)) {
    if rows * columns < SHARE_FROM {
        (0..rows).for_each(run);
        return;
    }
    let step = rows.div_ceil(4 * pool.threads());
    pool.run(rows.div_ceil(step), &|task| {
        (task * step..(task * step + step).min(rows)).for_each(run);
    });
}

/// `RMSNorm` of `row` times `weight`.
///
/// Panics if the lengths differ.
pub fn rms_norm(isa: Isa, row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(row.len() == weight.len() && row.len() == out.len());
    let kernel = dispatch!(
        isa,
        rms_norm_row(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32])
    );
    // SAFETY: the instructions of `isa` are there, and the lengths agree.
    unsafe { kernel(row, weight, epsilon, out) }
}

/// `SiLU` of the first half of `row` times the second half.
///
/// Panics if `out` is not half as long as `row`.
pub fn silu_mul(isa: Isa, row: &[f32], out: &mut [f32]) {
    assert_eq!(row.len(), 2 * out.len());
    let kernel = dispatch!(isa, silu_mul_row(row: &[f32], out: &mut [f32]));
    // SAFETY: the instructions of `isa` are there, and the lengths agree.
    unsafe { kernel(row, out) }
}

#[inline(always)]
unsafe fn rms_norm_row<V: Vector>(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    // SAFETY: the caller's promise; vectors end where the row does.
    unsafe {
        let mut squares = V::splat(0.0);
        for start in (0..row.len()).step_by(LANES) {
            let part = load::<V>(row, start);
            squares = part.fma(part, squares);
        }
        let mean = squares.sum() / row.len() as f32;
        let factor = V::splat(1.0 / (mean + epsilon).sqrt());
        for start in (0..row.len()).step_by(LANES) {
            let part = load::<V>(row, start)
                .mul(factor)
                .mul(load::<V>(weight, start));
            store(part, out, start);
        }
    }
}

#[inline(always)]
unsafe fn silu_mul_row<V: Vector>(row: &[f32], out: &mut [f32]) {
    let (gates, factors) = row.split_at(out.len());
    // SAFETY: the caller's promise; vectors end where the row does.
    unsafe {
        for start in (0..out.len()).step_by(LANES) {
            let gate = load::<V>(gates, start);
            let below = V::splat(0.0).sub(gate).exp().add(V::splat(1.0));
            store(gate.div(below).mul(load::<V>(factors, start)), out, start);
        }
    }
}

/// 16 elements from `start` on, or as many as there are and zeros.
#[inline(always)]
pub(crate) unsafe fn load<V: Vector>(from: &[f32], start: usize) -> V {
    let from = &from[start..];
    // SAFETY: the caller enabled the instructions; no more is read than there is.
    unsafe {
        if from.len() >= LANES {
            V::load(from.as_ptr())
        } else {
            V::load_first(from.as_ptr(), from.len())
        }
    }
}

/// The counterpart of `load`.
#[inline(always)]
pub(crate) unsafe fn store<V: Vector>(value: V, to: &mut [f32], start: usize) {
    let to = &mut to[start..];
    // SAFETY: the caller enabled the instructions; no more is written than there is room for.
    unsafe {
        if to.len() >= LANES {
            value.store(to.as_mut_ptr());
        } else {
            value.store_first(to.as_mut_ptr(), to.len());
        }
    }
}
