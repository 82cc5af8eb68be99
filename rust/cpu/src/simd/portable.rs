//! Vectors as plain arrays.
#![expect(
    unsafe_code,
    reason = "vectors are read from and written to raw memory"
)]
#![expect(clippy::inline_always, reason = "one vector is 16 steps of a loop")]

use super::{LANES, Vector};
use crate::half::{bf16_to_f32, f16_to_f32};

/// 16 floats in an array.
#[derive(Clone, Copy)]
pub struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

// SAFETY: no instructions are needed, and memory is used as the trait says.
unsafe impl Vector for Portable {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Self(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(f16_to_f32))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        Self(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(bf16_to_f32))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self) {
        let pairs = unsafe { from.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        let part = |place: usize| Self(pairs.map(|pair| bf16_to_f32(pair[place])));
        (part(0), part(1))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        Self(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|lane| {
            self.0[lane] * factor.0[lane] + term.0[lane]
        }))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        Self(
            self.0
                .map(|power| f32::from_bits(((power as i32 + 127) as u32) << 23)),
        )
    }

    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        let bytes = self.0.map(|value| value as i8);
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(bytes) }
    }

    #[inline(always)]
    unsafe fn zero_below(self, probe: Self, limit: f32) -> Self {
        self.zip(
            probe,
            |value, probe| if probe < limit { 0.0 } else { value },
        )
    }
}
