//! Softmax of one run of scores.
#![expect(unsafe_code, reason = "scores are read through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use crate::simd::{LANES, Vector};

/// Scores times `factor` to weights: the largest, and the sum of the weights.
#[inline(always)]
pub(super) unsafe fn softmax<V: Vector>(scores: &mut [f32], factor: f32) -> (f32, f32) {
    // SAFETY: the caller's promise; vectors end where the scores do.
    unsafe {
        let mut largest = V::splat(f32::NEG_INFINITY);
        let whole = scores.len() / LANES * LANES;
        for start in (0..whole).step_by(LANES) {
            largest = V::load(scores[start..].as_ptr()).max(largest);
        }
        let largest = scores[whole..]
            .iter()
            .copied()
            .fold(largest.largest(), f32::max)
            * factor;
        let (factor, shift) = (V::splat(factor), V::splat(-largest));
        let mut sum = V::splat(0.0);
        for start in (0..whole).step_by(LANES) {
            let weight = V::load(scores[start..].as_ptr()).fma(factor, shift).exp();
            sum = sum.add(weight);
            weight.store(scores[start..].as_mut_ptr());
        }
        let mut total = sum.sum();
        if whole < scores.len() {
            let count = scores.len() - whole;
            let rest = crate::rows::load::<V>(scores, whole)
                .fma(factor, shift)
                .exp();
            rest.store_first(scores[whole..].as_mut_ptr(), count);
            total += scores[whole..].iter().sum::<f32>();
        }
        (largest, total)
    }
}
