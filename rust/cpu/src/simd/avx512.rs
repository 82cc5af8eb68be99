//! Vectors of AVX-512.
#![expect(unsafe_code, reason = "intrinsics")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::Vector;
#[allow(
    clippy::wildcard_imports,
    reason = "dozens of intrinsics; not said under test"
)]
use std::arch::x86_64::*;

/// 16 floats in one register.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

// SAFETY: the trait asks that AVX-512 is enabled, and memory is used as it says.
unsafe impl Vector for Avx512 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mask = ((1_u32 << count.min(16)) - 1) as u16;
        Self(unsafe { _mm512_maskz_loadu_ps(mask, from) })
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        let mask = ((1_u32 << count.min(16)) - 1) as u16;
        unsafe { _mm512_mask_storeu_ps(to, mask, self.0) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe {
            let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            _mm256_storeu_si256(to.cast(), half);
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self) {
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff));
            (
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))),
                Self(_mm512_castsi512_ps(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let unknown = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let result = _mm512_mask_mov_epi32(rounded, unknown, quiet);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(result));
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe {
            let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm512_cvtepi32_ps(wide))
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, term: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Self(unsafe { _mm512_min_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(unsafe { _mm512_abs_ps(self.0) })
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(unsafe {
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)
        })
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { sum_256(_mm256_add_ps(self.low(), self.high())) }
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 16]) -> Self {
        // SAFETY: the caller enabled the instructions.
        unsafe {
            let pairs = [
                pair_sums(quarter_sums(&vectors, 0), quarter_sums(&vectors, 1)),
                pair_sums(quarter_sums(&vectors, 2), quarter_sums(&vectors, 3)),
            ];
            Self(_mm512_add_ps(
                _mm512_shuffle_ps::<0b10_00_10_00>(pairs[0], pairs[1]),
                _mm512_shuffle_ps::<0b11_01_11_01>(pairs[0], pairs[1]),
            ))
        }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u16) -> Self {
        Self(unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), bits, self.0) })
    }

    #[inline(always)]
    unsafe fn above(self, limit: f32) -> u16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, _mm512_set1_ps(limit)) }
    }

    #[inline(always)]
    unsafe fn zero_below(self, probe: Self, limit: f32) -> Self {
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(probe.0, _mm512_set1_ps(limit));
            Self(_mm512_maskz_mov_ps(keep, self.0))
        }
    }
}

impl Avx512 {
    /// What a register holds.
    #[inline(always)]
    pub(crate) fn from_register(register: __m512) -> Self {
        Self(register)
    }

    /// 16 integers as floats.
    ///
    /// # Safety
    ///
    /// AVX-512 must be enabled.
    #[inline(always)]
    pub unsafe fn from_integers(integers: __m512i) -> Self {
        Self(unsafe { _mm512_cvtepi32_ps(integers) })
    }

    #[inline(always)]
    unsafe fn low(self) -> __m256 {
        unsafe { _mm512_castps512_ps256(self.0) }
    }

    #[inline(always)]
    unsafe fn high(self) -> __m256 {
        unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0))) }
    }
}

/// Of the vectors `first`, `first` + 4, + 8 and + 12, one in each quarter: the lanes 4 apart added up,
/// halves to each other.
///
/// # Safety
///
/// AVX-512 must be enabled.
#[inline(always)]
unsafe fn quarter_sums(vectors: &[Avx512; 16], first: usize) -> __m512 {
    unsafe {
        let low = half_sums(vectors[first].0, vectors[first + 4].0);
        let high = half_sums(vectors[first + 8].0, vectors[first + 12].0);
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high),
        )
    }
}

/// The halves of each vector added to each other, one vector's in each half.
///
/// # Safety
///
/// AVX-512 must be enabled.
#[inline(always)]
unsafe fn half_sums(low: __m512, high: __m512) -> __m512 {
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>(low, high),
            _mm512_shuffle_f32x4::<0b11_10_11_10>(low, high),
        )
    }
}

/// In each quarter, the halves of either vector's quarter added to each other.
///
/// # Safety
///
/// AVX-512 must be enabled.
#[inline(always)]
unsafe fn pair_sums(low: __m512, high: __m512) -> __m512 {
    unsafe {
        let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
        _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)),
        )
    }
}

/// The sum of 8 lanes, halves added to each other.
///
/// # Safety
///
/// AVX must be enabled.
#[inline(always)]
pub unsafe fn sum_256(lanes: __m256) -> f32 {
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(lanes),
            _mm256_extractf128_ps::<1>(lanes),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
