//! Vectors of 16 floats, as each set of instructions has them.
//!
//! Kernels in floating point are written once over [`Vector`] and compiled once for each
//! implementation, inside a function that enables its instructions (`dispatch!`). Sums have the
//! same order everywhere; only whether a product is rounded before it is added differs.
//!
//! A closure is a function of its own, without those instructions: what calls a vector's methods
//! must be plain loops, or each method becomes a call.
#![expect(
    unsafe_code,
    reason = "vectors are read from and written to raw memory"
)]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

use crate::half::{f32_to_bf16, f32_to_f16};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// 16 floats.
///
/// # Safety
///
/// Every method may be called only where the implementation's instructions are enabled, and pointers
/// must be good for the 16 elements (or the number given) that are read or written there. They need
/// not be aligned.
#[expect(clippy::missing_safety_doc, reason = "the trait's own says it for all")]
#[expect(
    clippy::return_self_not_must_use,
    reason = "arithmetic is never called for an effect"
)]
pub unsafe trait Vector: Copy {
    /// `value` in all lanes.
    unsafe fn splat(value: f32) -> Self;
    /// From memory.
    unsafe fn load(from: *const f32) -> Self;
    /// To memory.
    unsafe fn store(self, to: *mut f32);
    /// From binary16.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// From bfloat16.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// From 16 pairs of bfloat16: the first of each, and the second.
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self);
    /// From bytes with a sign.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// The sums.
    unsafe fn add(self, other: Self) -> Self;
    /// The differences.
    unsafe fn sub(self, other: Self) -> Self;
    /// The products.
    unsafe fn mul(self, other: Self) -> Self;
    /// The quotients.
    unsafe fn div(self, other: Self) -> Self;
    /// `self` * `factor` + `term`.
    unsafe fn fma(self, factor: Self, term: Self) -> Self;
    /// The larger in each lane; `other` where one is not a number.
    unsafe fn max(self, other: Self) -> Self;
    /// The magnitudes.
    unsafe fn abs(self) -> Self;
    /// To the nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// 2 to the power of integers from -126 to 127.
    unsafe fn exp2_integer(self) -> Self;
    /// Integers from -128 to 127 as bytes.
    unsafe fn store_i8(self, to: *mut i8);

    /// The lanes, in order.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has 16 lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The first `count` lanes, the others 0.
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller's promise, and the array has 16 lanes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count.min(LANES));
            Self::load(lanes.as_ptr())
        }
    }

    /// Writes the first `count` lanes.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = self.to_array();
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count.min(LANES));
        }
    }

    /// As binary16, rounded to the nearest.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller's promise.
        let lanes = unsafe { self.to_array() }.map(f32_to_f16);
        unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, LANES) };
    }

    /// As bfloat16, rounded to the nearest.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller's promise.
        let lanes = unsafe { self.to_array() }.map(f32_to_bf16);
        unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, LANES) };
    }

    /// The sum of the lanes: halves added to each other, four times.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller's promise.
        fold(unsafe { self.to_array() }, |a, b| a + b)
    }

    /// The sum of each of 16 vectors, as [`sum`](Self::sum) gives it.
    #[inline(always)]
    unsafe fn sums(vectors: [Self; LANES]) -> Self {
        let mut sums = [0.0; LANES];
        // SAFETY: the caller's promise, and the array has 16 lanes.
        unsafe {
            for lane in 0..LANES {
                sums[lane] = vectors[lane].sum();
            }
            Self::load(sums.as_ptr())
        }
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller's promise.
        fold(unsafe { self.to_array() }, f32::max)
    }

    /// e to the power of each lane: relative error below 2e-7, 0 below -87.3, held at the largest
    /// finite values above 88.3. Not-a-number stays so.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let held = Self::splat(88.3).min(Self::splat(-87.3).max(self));
            let power = held.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            // ln 2 in two parts, the first with few enough bits for exact products (Cody and Waite).
            let rest = power.fma(Self::splat(-0.693_359_4), held);
            let rest = power.fma(Self::splat(2.121_944_4e-4), rest);
            let mut sum = Self::splat(1.987_569_1e-4);
            for coefficient in [
                1.398_2e-3,
                8.333_452e-3,
                4.166_579_6e-2,
                1.666_666_5e-1,
                0.5,
            ] {
                sum = sum.fma(rest, Self::splat(coefficient));
            }
            let series = sum.fma(rest.mul(rest), rest.add(Self::splat(1.0)));
            let result = series.mul(power.exp2_integer());
            result.zero_below(self, -87.3)
        }
    }

    /// The lanes whose bits are set, minus infinity in the others.
    #[inline(always)]
    unsafe fn keep(self, bits: u16) -> Self {
        // SAFETY: the caller's promise, and the array has 16 lanes.
        unsafe {
            let mut lanes = self.to_array();
            for (index, lane) in lanes.iter_mut().enumerate() {
                if bits >> index & 1 == 0 {
                    *lane = f32::NEG_INFINITY;
                }
            }
            Self::load(lanes.as_ptr())
        }
    }

    /// A bit for each lane that is greater than `limit`.
    #[inline(always)]
    unsafe fn above(self, limit: f32) -> u16 {
        // SAFETY: the caller's promise.
        let lanes = unsafe { self.to_array() };
        let mut bits = 0;
        for (index, lane) in lanes.into_iter().enumerate() {
            bits |= u16::from(lane > limit) << index;
        }
        bits
    }

    /// The smaller in each lane; `other` where one is not a number.
    unsafe fn min(self, other: Self) -> Self;
    /// `self` where `probe` >= `limit` or is not a number, else 0.
    unsafe fn zero_below(self, probe: Self, limit: f32) -> Self;
}

/// Has the cache line at an address fetched; the address need not be good for anything.
#[inline(always)]
pub fn prefetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every machine of the kind has the instruction, and it faults nowhere.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: likewise.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{from}]",
            from = in(reg) from,
            options(readonly, nostack, preserves_flags),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = from;
}

/// Has the cache line at an address fetched as far as the second level.
#[inline(always)]
pub fn prefetch_far<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every machine of the kind has the instruction, and it faults nowhere.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(from.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: likewise.
    unsafe {
        std::arch::asm!(
            "prfm pldl2keep, [{from}]",
            from = in(reg) from,
            options(readonly, nostack, preserves_flags),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = from;
}

#[inline(always)]
fn fold(lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// `body::<V>` for the vectors of an [`Isa`](crate::isa::Isa), as a function that enables its instructions.
macro_rules! dispatch {
    ($isa:expr, $body:ident $(<$($generic:ident),*>)? ($($name:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
        unsafe fn avx512 $(<$($generic: crate::attention::element::Element),*>)? ($($name: $type),*) {
            // SAFETY: the instructions are enabled here; the rest is the caller's promise.
            unsafe { $body::<crate::simd::avx512::Avx512 $($(, $generic)*)?>($($name),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2 $(<$($generic: crate::attention::element::Element),*>)? ($($name: $type),*) {
            // SAFETY: as above.
            unsafe { $body::<crate::simd::avx2::Avx2 $($(, $generic)*)?>($($name),*) }
        }
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "neon")]
        unsafe fn neon $(<$($generic: crate::attention::element::Element),*>)? ($($name: $type),*) {
            // SAFETY: as above.
            unsafe { $body::<crate::simd::neon::Neon $($(, $generic)*)?>($($name),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            crate::isa::Isa::Avx512 => avx512 $(::<$($generic),*>)?,
            #[cfg(target_arch = "x86_64")]
            crate::isa::Isa::Avx2 => avx2 $(::<$($generic),*>)?,
            #[cfg(target_arch = "aarch64")]
            crate::isa::Isa::NeonDot | crate::isa::Isa::Neon => neon $(::<$($generic),*>)?,
            _ => $body::<crate::simd::portable::Portable $($(, $generic)*)?>,
        }
    }};
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests;
