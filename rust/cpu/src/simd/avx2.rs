//! Vectors of AVX2 with FMA and F16C.
#![expect(unsafe_code, reason = "intrinsics")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::Vector;
use super::avx512::sum_256;
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::x86_64::*;

/// 16 floats in two registers.
#[derive(Clone, Copy)]
pub struct Avx2(__m256, __m256);

impl Avx2 {
    /// 16 integers, 8 in each register, as floats.
    ///
    /// # Safety
    ///
    /// AVX2 must be enabled.
    #[inline(always)]
    pub unsafe fn from_integers(first: __m256i, last: __m256i) -> Self {
        unsafe { Self(_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(last)) }
    }
}

// SAFETY: the trait asks that AVX2, FMA and F16C are enabled, and memory is used as it says.
unsafe impl Vector for Avx2 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        let lanes = unsafe { _mm256_set1_ps(value) };
        Self(lanes, lanes)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe {
            _mm_storeu_si128(
                to.cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            );
            _mm_storeu_si128(
                to.add(8).cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            );
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe {
            let first = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let last = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(first)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(last)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self) {
        unsafe {
            let first = _mm256_loadu_si256(from.cast());
            let last = _mm256_loadu_si256(from.add(16).cast());
            let mask = _mm256_set1_epi32(!0xffff);
            (
                Self(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(first)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(last)),
                ),
                Self(
                    _mm256_castsi256_ps(_mm256_and_si256(first, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(last, mask)),
                ),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe {
            let first = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let last = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
            Self(_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(last))
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_add_ps(self.0, other.0),
                _mm256_add_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_sub_ps(self.0, other.0),
                _mm256_sub_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_mul_ps(self.0, other.0),
                _mm256_mul_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_div_ps(self.0, other.0),
                _mm256_div_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, term: Self) -> Self {
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, factor.0, term.0),
                _mm256_fmadd_ps(self.1, factor.1, term.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_max_ps(self.0, other.0),
                _mm256_max_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_min_ps(self.0, other.0),
                _mm256_min_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Self(
                _mm256_andnot_ps(sign, self.0),
                _mm256_andnot_ps(sign, self.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe {
            Self(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.1),
            )
        }
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), bias);
            let last = _mm256_add_epi32(_mm256_cvtps_epi32(self.1), bias);
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(first)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(last)),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe {
            // Packing works within halves of the register: 0-3, 8-11, 4-7, 12-15.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.cast(), bytes);
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { sum_256(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn zero_below(self, probe: Self, limit: f32) -> Self {
        unsafe {
            let limit = _mm256_set1_ps(limit);
            Self(
                _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_NLT_UQ>(probe.0, limit)),
                _mm256_and_ps(self.1, _mm256_cmp_ps::<_CMP_NLT_UQ>(probe.1, limit)),
            )
        }
    }
}
