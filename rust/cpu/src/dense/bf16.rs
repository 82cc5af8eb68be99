//! Products of pairs of bfloat16 with VDPBF16PS: twice the arithmetic of float32.
#![expect(unsafe_code, reason = "intrinsics over raw memory")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use super::WIDTH;
use super::panel::{PanelJob, by_count};
use crate::simd::LANES;
use crate::simd::avx512::Avx512;
use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_setzero_si512,
};
use std::mem::transmute;

/// Multiplies a panel with a block of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
pub(super) unsafe fn multiply(job: &PanelJob) {
    // SAFETY: the caller's promise.
    unsafe {
        by_count!(job.block.rows, |COUNT| {
            if job.outputs[1].is_some() {
                multiply_part::<COUNT, 2>(job);
            } else {
                multiply_part::<COUNT, 1>(job);
            }
        });
    }
}

#[inline(always)]
unsafe fn multiply_part<const COUNT: usize, const WIDE: usize>(job: &PanelJob) {
    // SAFETY: the caller's promise: a panel's words for each step, and COUNT words of inputs.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); WIDE]; COUNT];
        for step in 0..job.steps {
            job.fetch(step);
            let mut words = [_mm512_setzero_si512(); WIDE];
            for vector in 0..WIDE {
                let from = job.weights.add(step * WIDTH + vector * LANES);
                words[vector] = _mm512_loadu_si512(from.cast());
            }
            let input = job.block.words.add(step * COUNT);
            for row in 0..COUNT {
                let pair = _mm512_set1_epi32(input.add(row).read() as i32);
                for vector in 0..WIDE {
                    sums[row][vector] = _mm512_dpbf16_ps(
                        sums[row][vector],
                        transmute::<__m512i, __m512bh>(pair),
                        transmute::<__m512i, __m512bh>(words[vector]),
                    );
                }
            }
        }
        for row in 0..COUNT {
            for vector in 0..WIDE {
                job.write(vector, row, Avx512::from_register(sums[row][vector]));
            }
        }
    }
}
