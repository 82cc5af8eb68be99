//! A panel times a tile with NEON.
//!
//! `SDOT` adds four products of signed bytes to each of 4 sums, the four bytes of a row taken from one
//! place of a register that holds those of 4 rows. Machines without it (before Armv8.2) multiply into
//! 16 bits and add up pairs twice; the first sum of a pair fits (2 * 128 * 127 = 32,512). Codes of 4
//! bits are signed bytes as they are; those of 8 bits become so by turning over their highest bit,
//! which subtracts 128: nothing is left to subtract.
#![expect(unsafe_code, reason = "intrinsics and instructions")]
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
use crate::simd::{Vector, neon::Neon};
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::aarch64::*;
use std::arch::asm;

/// Bytes of one step's codes.
const RUN: usize = PANEL * STEP;

/// Rows at a time: with their sums for 16 outputs they fill half of the registers, and their bytes of
/// one step a register.
const ROWS: usize = 4;

/// The sums of a row's products with 16 outputs.
type Sums = [int32x4_t; 4];

/// How products of bytes are added to sums.
trait Products {
    /// To each of 4 sums, the products of its four weights and of the four inputs at `ROW`.
    ///
    /// # Safety
    ///
    /// The instructions must be enabled; inputs are not -128.
    unsafe fn add<const ROW: i32>(
        sums: int32x4_t,
        weights: int8x16_t,
        inputs: int8x16_t,
    ) -> int32x4_t;
}

/// With `SDOT`.
struct Dot;

impl Products for Dot {
    #[inline(always)]
    unsafe fn add<const ROW: i32>(
        sums: int32x4_t,
        weights: int8x16_t,
        inputs: int8x16_t,
    ) -> int32x4_t {
        let mut sums = sums;
        // SAFETY: registers only; the caller enabled the instruction, for which the oldest compiler
        // that is promised to do has no intrinsic.
        unsafe {
            asm!(
                "sdot {sums:v}.4s, {weights:v}.16b, {inputs:v}.4b[{row}]",
                sums = inlateout(vreg) sums,
                weights = in(vreg) weights,
                inputs = in(vreg) inputs,
                row = const ROW,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }
}

/// With what every NEON has.
struct Pairs;

impl Products for Pairs {
    #[inline(always)]
    unsafe fn add<const ROW: i32>(
        sums: int32x4_t,
        weights: int8x16_t,
        inputs: int8x16_t,
    ) -> int32x4_t {
        // SAFETY: the caller enabled the instructions.
        unsafe {
            let inputs = vdupq_laneq_s32::<ROW>(vreinterpretq_s32_s8(inputs));
            let inputs = vreinterpretq_s8_s32(inputs);
            let low = vmull_s8(vget_low_s8(weights), vget_low_s8(inputs));
            let high = vmull_high_s8(weights, inputs);
            vpadalq_s16(sums, vpaddq_s16(low, high))
        }
    }
}

/// The kernel with `SDOT`, for tiles of any width.
pub fn dot_kernel(layout: Layout) -> Kernel {
    by_layout!(layout, |INDEX| multiply_dot::<INDEX>)
}

/// The kernel without, for tiles of any width.
pub fn kernel(layout: Layout) -> Kernel {
    by_layout!(layout, |INDEX| multiply_pairs::<INDEX>)
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply_dot<const LAYOUT: usize>(job: &TileJob) {
    // SAFETY: the caller's promise.
    unsafe { multiply::<LAYOUT, Dot>(job) }
}

#[target_feature(enable = "neon")]
unsafe fn multiply_pairs<const LAYOUT: usize>(job: &TileJob) {
    // SAFETY: the caller's promise.
    unsafe { multiply::<LAYOUT, Pairs>(job) }
}

#[inline(always)]
unsafe fn multiply<const LAYOUT: usize, P: Products>(job: &TileJob) {
    let mut row = 0;
    while row < job.tile.width {
        // SAFETY: the caller's promise.
        unsafe {
            match job.tile.width - row {
                1 => multiply_rows::<LAYOUT, P, 1>(job, row),
                2 => multiply_rows::<LAYOUT, P, 2>(job, row),
                3 => multiply_rows::<LAYOUT, P, 3>(job, row),
                _ => multiply_rows::<LAYOUT, P, ROWS>(job, row),
            }
        }
        row += ROWS;
    }
}

#[inline(always)]
unsafe fn multiply_rows<const LAYOUT: usize, P: Products, const COUNT: usize>(
    job: &TileJob,
    first: usize,
) {
    let layout = const { Layout::ALL[LAYOUT] };
    let tile = &job.tile;
    // SAFETY: the caller's promise; all distances are those of the layout.
    unsafe {
        let mut totals = [Neon::splat(0.0); COUNT];
        for group in 0..job.groups {
            let place = group * tile.width + first;
            let codes = job.panel.add(group * layout.code_bytes());
            let inputs = tile
                .codes
                .add(group * layout.group() * tile.width + first * STEP);
            let mut dots = [[vdupq_n_s32(0); 4]; COUNT];
            if layout.has_nibbles() && layout.zero() != 0 {
                for row in 0..COUNT {
                    dots[row] = [vdupq_n_s32(*tile.offsets.add(place + row)); 4];
                }
            }
            add_group::<LAYOUT, P, COUNT>(&mut dots, codes, inputs, tile.width);
            let scale = numbers(
                layout,
                job.panel.add(layout.scale_offset(job.groups, group)),
            );
            for row in 0..COUNT {
                let dot = Neon::from_integers(dots[row]).mul(scale);
                totals[row] = dot.fma(Neon::splat(*tile.scales.add(place + row)), totals[row]);
            }
            if layout.has_minimum() {
                let from = job.panel.add(layout.minimum_offset(job.groups, group));
                let minimum = numbers(layout, from);
                for row in 0..COUNT {
                    let sum = Neon::splat(*tile.sums.add(place + row));
                    totals[row] = minimum.fma(sum, totals[row]);
                }
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            job.output.write(first + row, total);
        }
    }
}

/// Adds the products of one group.
#[inline(always)]
unsafe fn add_group<const LAYOUT: usize, P: Products, const COUNT: usize>(
    dots: &mut [Sums; COUNT],
    codes: *const u8,
    inputs: *const u8,
    width: usize,
) {
    let layout = const { Layout::ALL[LAYOUT] };
    // SAFETY: the caller's promise.
    unsafe {
        if layout.has_nibbles() {
            let mask = vdupq_n_u8(15);
            let half = layout.steps() / 2;
            for run in 0..half {
                let (mut low, mut high) = ([vdupq_n_s8(0); 4], [vdupq_n_s8(0); 4]);
                for quarter in 0..4 {
                    let both = vld1q_u8(codes.add(run * RUN + quarter * 16));
                    low[quarter] = vreinterpretq_s8_u8(vandq_u8(both, mask));
                    high[quarter] = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
                }
                add_step::<P, COUNT>(dots, low, inputs.add(run * width * STEP));
                add_step::<P, COUNT>(dots, high, inputs.add((run + half) * width * STEP));
            }
        } else {
            let sign = vdupq_n_u8(128);
            for step in 0..layout.steps() {
                let mut weights = [vdupq_n_s8(0); 4];
                for quarter in 0..4 {
                    let codes = vld1q_u8(codes.add(step * RUN + quarter * 16));
                    weights[quarter] = vreinterpretq_s8_u8(veorq_u8(codes, sign));
                }
                add_step::<P, COUNT>(dots, weights, inputs.add(step * width * STEP));
            }
        }
    }
}

/// Adds the products of one step: each row's place in the register of inputs is part of the
/// instruction, so that rows are written out.
#[inline(always)]
unsafe fn add_step<P: Products, const COUNT: usize>(
    dots: &mut [Sums; COUNT],
    weights: [int8x16_t; 4],
    inputs: *const u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let inputs = step_inputs::<COUNT>(inputs);
        add_row::<P, 0>(&mut dots[0], weights, inputs);
        if COUNT > 1 {
            add_row::<P, 1>(&mut dots[1], weights, inputs);
        }
        if COUNT > 2 {
            add_row::<P, 2>(&mut dots[2], weights, inputs);
        }
        if COUNT > 3 {
            add_row::<P, 3>(&mut dots[3], weights, inputs);
        }
    }
}

#[inline(always)]
unsafe fn add_row<P: Products, const ROW: i32>(
    sums: &mut Sums,
    weights: [int8x16_t; 4],
    inputs: int8x16_t,
) {
    for quarter in 0..4 {
        // SAFETY: the caller's promise.
        sums[quarter] = unsafe { P::add::<ROW>(sums[quarter], weights[quarter], inputs) };
    }
}

/// The inputs of one step, four bytes of each row; no more is read than there is.
#[inline(always)]
unsafe fn step_inputs<const COUNT: usize>(from: *const u8) -> int8x16_t {
    // SAFETY: four bytes lie there for each row.
    unsafe {
        let four = |row: usize| from.add(row * STEP).cast::<i32>().read_unaligned();
        vreinterpretq_s8_s32(match COUNT {
            1 => vdupq_n_s32(four(0)),
            2 => vcombine_s32(vld1_s32(from.cast()), vdup_n_s32(0)),
            3 => vcombine_s32(vld1_s32(from.cast()), vdup_n_s32(four(2))),
            _ => vld1q_s32(from.cast()),
        })
    }
}

#[inline(always)]
unsafe fn numbers(layout: Layout, from: *const u8) -> Neon {
    // SAFETY: 16 numbers lie there.
    unsafe {
        if layout.is_wide() {
            Neon::load(from.cast())
        } else {
            Neon::load_f16(from.cast())
        }
    }
}
