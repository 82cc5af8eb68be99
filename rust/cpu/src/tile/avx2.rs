//! A panel times a tile with AVX2.
//!
//! `VPMADDUBSW` adds pairs of products of unsigned and signed bytes in 16 bits, and saturates. With
//! codes of 4 bits eight steps of it fit into 16 bits (8 * 2 * 15 * 127 = 30,480). With codes of 8 bits
//! the unsigned side is the weight's magnitude and its sign goes to the input (2 * 128 * 127 = 32,512
//! fits), and each step is widened.
#![expect(unsafe_code, reason = "intrinsics")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use super::{Kernel, TileJob, by_layout};
use crate::layout::{Layout, PANEL, STEP};
use crate::simd::{Vector, avx2::Avx2};
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::x86_64::*;

/// Bytes of one step's codes, and of those for the 8 outputs of a register.
const RUN: usize = PANEL * STEP;
const HALF_RUN: usize = RUN / 2;

/// Rows at a time: with their sums for 16 outputs they fill half of the registers.
const ROWS: usize = 4;

/// The kernel, for tiles of any width.
pub fn kernel(layout: Layout) -> Kernel {
    by_layout!(layout, |INDEX| multiply::<INDEX>)
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const LAYOUT: usize>(job: &TileJob) {
    let mut row = 0;
    while row < job.tile.width {
        // SAFETY: the caller's promise.
        unsafe {
            match job.tile.width - row {
                1 => multiply_rows::<LAYOUT, 1>(job, row),
                2 => multiply_rows::<LAYOUT, 2>(job, row),
                3 => multiply_rows::<LAYOUT, 3>(job, row),
                _ => multiply_rows::<LAYOUT, ROWS>(job, row),
            }
        }
        row += ROWS;
    }
}

#[inline(always)]
unsafe fn multiply_rows<const LAYOUT: usize, const COUNT: usize>(job: &TileJob, first: usize) {
    let layout = const { Layout::ALL[LAYOUT] };
    let tile = &job.tile;
    // SAFETY: the caller's promise; all distances are those of the layout.
    unsafe {
        let mut totals = [Avx2::splat(0.0); COUNT];
        for group in 0..job.groups {
            let place = group * tile.width + first;
            let codes = job.panel.add(group * layout.code_bytes());
            let inputs = tile
                .codes
                .add(group * layout.group() * tile.width + first * STEP);
            let low = half_dots::<LAYOUT, COUNT>(codes, inputs, tile.width);
            let high = half_dots::<LAYOUT, COUNT>(codes.add(HALF_RUN), inputs, tile.width);
            let scale = numbers(
                layout,
                job.panel.add(layout.scale_offset(job.groups, group)),
            );
            for row in 0..COUNT {
                let (mut first, mut last) = (low[row], high[row]);
                if layout.has_nibbles() && layout.zero() != 0 {
                    let offset = _mm256_set1_epi32(*tile.offsets.add(place + row));
                    first = _mm256_add_epi32(first, offset);
                    last = _mm256_add_epi32(last, offset);
                }
                let dot = Avx2::from_integers(first, last).mul(scale);
                totals[row] = dot.fma(Avx2::splat(*tile.scales.add(place + row)), totals[row]);
            }
            if layout.has_minimum() {
                let from = job.panel.add(layout.minimum_offset(job.groups, group));
                let minimum = numbers(layout, from);
                for row in 0..COUNT {
                    let sum = Avx2::splat(*tile.sums.add(place + row));
                    totals[row] = minimum.fma(sum, totals[row]);
                }
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            job.output.write(first + row, total);
        }
    }
}

/// The products of one group with 8 outputs. Those of 4 bits still lack their offset.
#[inline(always)]
unsafe fn half_dots<const LAYOUT: usize, const COUNT: usize>(
    codes: *const u8,
    inputs: *const u8,
    width: usize,
) -> [__m256i; COUNT] {
    let layout = const { Layout::ALL[LAYOUT] };
    // SAFETY: the caller's promise.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut dots = [_mm256_setzero_si256(); COUNT];
        if layout.has_nibbles() {
            let mask = _mm256_set1_epi8(15);
            let half = layout.steps() / 2;
            for run in 0..half {
                let both = _mm256_load_si256(codes.add(run * RUN).cast());
                let low = _mm256_and_si256(both, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
                for row in 0..COUNT {
                    let first = four(inputs.add((run * width + row) * STEP));
                    let last = four(inputs.add(((run + half) * width + row) * STEP));
                    dots[row] = _mm256_add_epi16(dots[row], _mm256_maddubs_epi16(low, first));
                    dots[row] = _mm256_add_epi16(dots[row], _mm256_maddubs_epi16(high, last));
                }
            }
            for row in 0..COUNT {
                dots[row] = _mm256_madd_epi16(dots[row], ones);
            }
            return dots;
        }
        let sign = _mm256_set1_epi8(-128);
        for step in 0..layout.steps() {
            let weights = _mm256_load_si256(codes.add(step * RUN).cast());
            let weights = _mm256_xor_si256(weights, sign);
            let magnitudes = _mm256_abs_epi8(weights);
            for row in 0..COUNT {
                let signed =
                    _mm256_sign_epi8(four(inputs.add((step * width + row) * STEP)), weights);
                let pairs = _mm256_maddubs_epi16(magnitudes, signed);
                dots[row] = _mm256_add_epi32(dots[row], _mm256_madd_epi16(pairs, ones));
            }
        }
        dots
    }
}

/// Four bytes in every lane.
#[inline(always)]
unsafe fn four(inputs: *const u8) -> __m256i {
    // SAFETY: four bytes lie there.
    unsafe { _mm256_set1_epi32(inputs.cast::<i32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn numbers(layout: Layout, from: *const u8) -> Avx2 {
    // SAFETY: 16 numbers lie there.
    unsafe {
        if layout.is_wide() {
            Avx2::load(from.cast())
        } else {
            Avx2::load_f16(from.cast())
        }
    }
}
