//! Products in float32, over vectors of any kind; bfloat16 weights are widened in the register.
#![expect(
    unsafe_code,
    reason = "weights and inputs are read through vectors and pointers"
)]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use super::panel::{Kernel, PanelJob, by_count};
use super::{WIDTH, WORD};
use crate::attention::element::Element;
use crate::isa::Isa;
use crate::simd::{LANES, Vector, dispatch};

/// The kernel for weights of a type: float32 or bfloat16.
pub(super) fn kernel<E: Element>(isa: Isa) -> Kernel {
    dispatch!(isa, multiply<E>(job: &PanelJob))
}

#[inline(always)]
unsafe fn multiply<V: Vector, E: Element>(job: &PanelJob) {
    // SAFETY: the caller's promise.
    unsafe {
        by_count!(job.block.rows, |COUNT| {
            if job.vectors == 2 && job.outputs[1].is_some() {
                multiply_part::<V, E, COUNT, 2>(job, 0);
            } else {
                multiply_part::<V, E, COUNT, 1>(job, 0);
                if job.outputs[1].is_some() {
                    multiply_part::<V, E, COUNT, 1>(job, 1);
                }
            }
        });
    }
}

/// The products with WIDE vectors of outputs, from the vector `first` of the panel on.
#[inline(always)]
unsafe fn multiply_part<V: Vector, E: Element, const COUNT: usize, const WIDE: usize>(
    job: &PanelJob,
    first: usize,
) {
    // SAFETY: the caller's promise: a panel's words for each step, and COUNT inputs for each weight.
    unsafe {
        let (weights, inputs) = (job.weights.add(first * LANES), job.block.words);
        let per_word = WORD / size_of::<E>();
        let mut sums = [[V::splat(0.0); WIDE]; COUNT];
        for step in 0..job.steps {
            job.fetch(step);
            let mut words = [(V::splat(0.0), V::splat(0.0)); WIDE];
            for vector in 0..WIDE {
                let from = weights.add(step * WIDTH + vector * LANES);
                words[vector] = if per_word == 1 {
                    (V::load(from.cast()), V::splat(0.0))
                } else {
                    V::load_bf16_pairs(from.cast())
                };
            }
            let input = inputs.add(step * per_word * COUNT).cast::<f32>();
            for row in 0..COUNT {
                let value = V::splat(*input.add(row));
                for vector in 0..WIDE {
                    sums[row][vector] = value.fma(words[vector].0, sums[row][vector]);
                }
            }
            if per_word == 2 {
                for row in 0..COUNT {
                    let value = V::splat(*input.add(COUNT + row));
                    for vector in 0..WIDE {
                        sums[row][vector] = value.fma(words[vector].1, sums[row][vector]);
                    }
                }
            }
        }
        for row in 0..COUNT {
            for vector in 0..WIDE {
                job.write(first + vector, row, sums[row][vector]);
            }
        }
    }
}
