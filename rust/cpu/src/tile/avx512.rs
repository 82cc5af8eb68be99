//! A panel times a tile with AVX-512 VNNI.
//!
//! `VPDPBUSD` adds four products of unsigned and signed bytes to each of 16 sums. Weights are the
//! unsigned side, one output a lane; the inputs of a step are broadcast to all lanes by the instruction
//! itself.
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
use crate::simd::{Vector, avx512::Avx512};
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::x86_64::*;

/// Bytes of one step's codes.
const RUN: usize = PANEL * STEP;

/// The kernel for tiles of `width` rows.
pub fn kernel(layout: Layout, width: usize) -> Kernel {
    by_layout!(layout, |INDEX| match width {
        1 => multiply::<INDEX, 1>,
        2 => multiply::<INDEX, 2>,
        3 => multiply::<INDEX, 3>,
        4 => multiply::<INDEX, 4>,
        5 => multiply::<INDEX, 5>,
        6 => multiply::<INDEX, 6>,
        7 => multiply::<INDEX, 7>,
        _ => multiply::<INDEX, 8>,
    })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn multiply<const LAYOUT: usize, const WIDTH: usize>(job: &TileJob) {
    let layout = const { Layout::ALL[LAYOUT] };
    let tile = &job.tile;
    // SAFETY: the caller's promise; all distances are those of the layout.
    unsafe {
        let mut codes = job.panel;
        let mut scales = job.panel.add(layout.scale_offset(job.groups, 0));
        let mut minima = job.panel.add(layout.minimum_offset(job.groups, 0));
        let mut inputs = tile.codes;
        let mut totals = [Avx512::splat(0.0); WIDTH];
        let line_bytes = layout.panel_bytes(1);
        for group in 0..job.groups {
            let place = group * WIDTH;
            if !job.next.is_null() {
                let ahead = job.next.add(group * line_bytes);
                for line in 0..line_bytes / 64 {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.add(line * 64).cast());
                }
            }
            let dots = group_dots::<LAYOUT, WIDTH>(codes, inputs, tile.offsets.add(place));
            let scale = numbers(layout, scales);
            for row in 0..WIDTH {
                let dot = Avx512::from_integers(dots[row]).mul(scale);
                totals[row] = dot.fma(Avx512::splat(*tile.scales.add(place + row)), totals[row]);
            }
            if layout.has_minimum() {
                let minimum = numbers(layout, minima);
                for row in 0..WIDTH {
                    let sum = Avx512::splat(*tile.sums.add(place + row));
                    totals[row] = minimum.fma(sum, totals[row]);
                }
            }
            codes = codes.add(layout.code_bytes());
            scales = scales.add(layout.scale_bytes());
            minima = minima.add(layout.scale_bytes());
            inputs = inputs.add(layout.group() * WIDTH);
        }
        for (row, total) in totals.into_iter().enumerate() {
            job.output.write(row, total);
        }
    }
}

/// The products of one group, as integers.
#[inline(always)]
unsafe fn group_dots<const LAYOUT: usize, const WIDTH: usize>(
    codes: *const u8,
    inputs: *const u8,
    offsets: *const i32,
) -> [__m512i; WIDTH] {
    let layout = const { Layout::ALL[LAYOUT] };
    // SAFETY: the caller's promise.
    unsafe {
        let mut dots = [_mm512_setzero_si512(); WIDTH];
        if layout.zero() != 0 {
            for row in 0..WIDTH {
                dots[row] = _mm512_set1_epi32(*offsets.add(row));
            }
        }
        if layout.has_nibbles() {
            let mask = _mm512_set1_epi8(15);
            let half = layout.steps() / 2;
            for run in 0..half {
                let both = _mm512_load_si512(codes.add(run * RUN).cast());
                let low = _mm512_and_si512(both, mask);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask);
                add_step(&mut dots, low, inputs.add(run * WIDTH * STEP));
                add_step(&mut dots, high, inputs.add((run + half) * WIDTH * STEP));
            }
        } else {
            for step in 0..layout.steps() {
                let weights = _mm512_load_si512(codes.add(step * RUN).cast());
                add_step(&mut dots, weights, inputs.add(step * WIDTH * STEP));
            }
        }
        dots
    }
}

#[inline(always)]
unsafe fn add_step<const WIDTH: usize>(
    dots: &mut [__m512i; WIDTH],
    weights: __m512i,
    inputs: *const u8,
) {
    for row in 0..WIDTH {
        // SAFETY: four bytes lie there for each row.
        unsafe {
            let four = inputs.add(row * STEP).cast::<i32>().read_unaligned();
            dots[row] = _mm512_dpbusd_epi32(dots[row], weights, _mm512_set1_epi32(four));
        }
    }
}

#[inline(always)]
unsafe fn numbers(layout: Layout, from: *const u8) -> Avx512 {
    // SAFETY: 16 numbers lie there.
    unsafe {
        if layout.is_wide() {
            Avx512::load(from.cast())
        } else {
            Avx512::load_f16(from.cast())
        }
    }
}
