//! Vectors of NEON.
//!
//! Conversions from and to binary16 belong to every NEON, but the oldest compiler that is promised to
//! do has no intrinsics for them: they are instructions in assembler.
#![expect(unsafe_code, reason = "intrinsics and instructions")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::{LANES, Vector};
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::aarch64::*;
use std::arch::asm;

/// 16 floats in four registers.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; 4]);

/// A bit for each lane of a register: those of register `i` belong `4 * i` further up.
const BITS: [u32; 4] = [1, 2, 4, 8];

/// An expression for each of the four registers, its index as a constant.
macro_rules! registers {
    (|$index:ident| $value:expr) => {
        [
            {
                const $index: usize = 0;
                $value
            },
            {
                const $index: usize = 1;
                $value
            },
            {
                const $index: usize = 2;
                $value
            },
            {
                const $index: usize = 3;
                $value
            },
        ]
    };
}

impl Neon {
    /// 16 integers, 4 in each register, as floats.
    ///
    /// # Safety
    ///
    /// NEON must be enabled.
    #[inline(always)]
    pub unsafe fn from_integers(integers: [int32x4_t; 4]) -> Self {
        Self(unsafe { registers!(|I| vcvtq_f32_s32(integers[I])) })
    }

    #[inline(always)]
    unsafe fn to_integers(self) -> [int32x4_t; 4] {
        unsafe { registers!(|I| vcvtnq_s32_f32(self.0[I])) }
    }

    /// Lanes 4 apart added up, halves to each other.
    #[inline(always)]
    unsafe fn quarter_sums(self) -> float32x4_t {
        unsafe {
            vaddq_f32(
                vaddq_f32(self.0[0], self.0[2]),
                vaddq_f32(self.0[1], self.0[3]),
            )
        }
    }
}

// SAFETY: the trait asks that NEON is enabled, and memory is used as it says.
unsafe impl Vector for Neon {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([unsafe { vdupq_n_f32(value) }; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { registers!(|I| vld1q_f32(from.add(4 * I))) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { registers!(|I| vst1q_f32(to.add(4 * I), self.0[I])) };
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Self(unsafe { registers!(|I| widen(vld1_u16(from.add(4 * I)))) })
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe { registers!(|I| vst1_u16(to.add(4 * I), narrow(self.0[I]))) };
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        Self(unsafe {
            registers!(|I| {
                let wide = vmovl_u16(vld1_u16(from.add(4 * I)));
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide))
            })
        })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self) {
        unsafe {
            let pairs = registers!(|I| vreinterpretq_u32_u16(vld1q_u16(from.add(8 * I))));
            let mask = vdupq_n_u32(!0xffff);
            (
                Self(registers!(|I| vreinterpretq_f32_u32(vshlq_n_u32::<16>(
                    pairs[I]
                )))),
                Self(registers!(|I| vreinterpretq_f32_u32(vandq_u32(
                    pairs[I], mask
                )))),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            Self::from_integers([
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ])
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe { registers!(|I| vaddq_f32(self.0[I], other.0[I])) })
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(unsafe { registers!(|I| vsubq_f32(self.0[I], other.0[I])) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(unsafe { registers!(|I| vmulq_f32(self.0[I], other.0[I])) })
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Self(unsafe { registers!(|I| vdivq_f32(self.0[I], other.0[I])) })
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, term: Self) -> Self {
        Self(unsafe { registers!(|I| vfmaq_f32(term.0[I], self.0[I], factor.0[I])) })
    }

    // `FMAX` and `FMIN` give not-a-number whichever side it is on.
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe {
            registers!(|I| {
                let larger = vcgtq_f32(self.0[I], other.0[I]);
                vbslq_f32(larger, self.0[I], other.0[I])
            })
        })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Self(unsafe {
            registers!(|I| {
                let smaller = vcltq_f32(self.0[I], other.0[I]);
                vbslq_f32(smaller, self.0[I], other.0[I])
            })
        })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(unsafe { registers!(|I| vabsq_f32(self.0[I])) })
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(unsafe { registers!(|I| vrndnq_f32(self.0[I])) })
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        unsafe {
            let powers = self.to_integers();
            Self(registers!(|I| {
                let biased = vaddq_s32(powers[I], vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            }))
        }
    }

    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe {
            let integers = self.to_integers();
            let low = vqmovn_high_s32(vqmovn_s32(integers[0]), integers[1]);
            let high = vqmovn_high_s32(vqmovn_s32(integers[2]), integers[3]);
            vst1q_s8(to, vqmovn_high_s16(vqmovn_s16(low), high));
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let four = self.quarter_sums();
            vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; LANES]) -> Self {
        Self(unsafe {
            registers!(|I| vpaddq_f32(
                pair_sums(vectors[4 * I], vectors[4 * I + 1]),
                pair_sums(vectors[4 * I + 2], vectors[4 * I + 3]),
            ))
        })
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            vmaxnmvq_f32(vmaxnmq_f32(
                vmaxnmq_f32(self.0[0], self.0[2]),
                vmaxnmq_f32(self.0[1], self.0[3]),
            ))
        }
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u16) -> Self {
        Self(unsafe {
            let lowest = vdupq_n_f32(f32::NEG_INFINITY);
            let places = vld1q_u32(BITS.as_ptr());
            registers!(|I| {
                let kept = vtstq_u32(vdupq_n_u32(u32::from(bits) >> (4 * I)), places);
                vbslq_f32(kept, self.0[I], lowest)
            })
        })
    }

    #[inline(always)]
    unsafe fn above(self, limit: f32) -> u16 {
        unsafe {
            let places = vld1q_u32(BITS.as_ptr());
            let [a, b, c, d] = registers!(|I| {
                let greater = vcgtq_f32(self.0[I], vdupq_n_f32(limit));
                vshlq_n_u32::<{ 4 * I as i32 }>(vandq_u32(greater, places))
            });
            vaddvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d))) as u16
        }
    }

    #[inline(always)]
    unsafe fn zero_below(self, probe: Self, limit: f32) -> Self {
        Self(unsafe {
            registers!(|I| {
                let below = vcltq_f32(probe.0[I], vdupq_n_f32(limit));
                vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(self.0[I]), below))
            })
        })
    }
}

/// Of each vector, the lanes 2 apart added up, halves to each other.
///
/// # Safety
///
/// NEON must be enabled.
#[inline(always)]
unsafe fn pair_sums(first: Neon, last: Neon) -> float32x4_t {
    unsafe {
        let (first, last) = (first.quarter_sums(), last.quarter_sums());
        vaddq_f32(
            vcombine_f32(vget_low_f32(first), vget_low_f32(last)),
            vcombine_f32(vget_high_f32(first), vget_high_f32(last)),
        )
    }
}

/// The values of four binary16.
///
/// # Safety
///
/// NEON must be enabled.
#[inline(always)]
unsafe fn widen(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: one register to another; the instruction belongs to NEON.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

/// The nearest binary16 of four floats, ties to even.
///
/// # Safety
///
/// NEON must be enabled.
#[inline(always)]
unsafe fn narrow(wide: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: one register to another; the instruction belongs to NEON.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {wide:v}.4s",
            halves = lateout(vreg) halves,
            wide = in(vreg) wide,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    halves
}
