//! How keys and values are stored.
#![expect(unsafe_code, reason = "elements are read and written through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use crate::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::simd::{LANES, Vector};

/// The type of an element of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// float32.
    F32,
    /// binary16; what is too large becomes infinite.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit integers with a scale for each token and head.
    I8,
}

impl ElementType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }
}

/// An element of the cache, as memory holds it.
pub trait Element: Copy + Default {
    /// Whether each token and head has a scale.
    const IS_SCALED: bool = false;

    /// The element's value, without its scale.
    fn widen(self) -> f32;

    /// The element nearest to a value that is scaled already.
    fn narrow(value: f32) -> Self;

    /// 16 elements.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and 16 elements must lie there.
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// 16 elements of values that are scaled already.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and there must be room for 16 elements.
    unsafe fn store<V: Vector>(value: V, to: *mut Self);

    /// The first `count` of 16 elements, the others 0.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and `count` elements must lie there.
    #[inline(always)]
    unsafe fn load_first<V: Vector>(from: *const Self, count: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            if count >= LANES {
                return Self::load(from);
            }
            let mut lanes = [0.0; LANES];
            for (index, lane) in lanes.iter_mut().enumerate().take(count) {
                *lane = from.add(index).read().widen();
            }
            V::load(lanes.as_ptr())
        }
    }

    /// Stores the first `count` of 16 values.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and there must be room for `count` elements.
    #[inline(always)]
    unsafe fn store_first<V: Vector>(value: V, to: *mut Self, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if count >= LANES {
                return Self::store(value, to);
            }
            for (index, lane) in value.to_array().into_iter().enumerate().take(count) {
                to.add(index).write(Self::narrow(lane));
            }
        }
    }
}

/// A binary16.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F16(u16);

/// A bfloat16.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store(to) }
    }
}

impl Element for F16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f16_to_f32(self.0)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self(f32_to_f16(value))
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store_f16(to.cast()) }
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16_to_f32(self.0)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self(f32_to_bf16(value))
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store_bf16(to.cast()) }
    }
}

impl Element for i8 {
    const IS_SCALED: bool = true;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value.round_ties_even() as Self
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_i8(from) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.round().store_i8(to) }
    }
}

/// `$body` with the element type of the cache as the type `$name`.
macro_rules! by_element {
    ($kind:expr, |$name:ident| $body:expr) => {
        match $kind {
            $crate::attention::element::ElementType::F32 => {
                type $name = f32;
                $body
            }
            $crate::attention::element::ElementType::F16 => {
                type $name = $crate::attention::element::F16;
                $body
            }
            $crate::attention::element::ElementType::Bf16 => {
                type $name = $crate::attention::element::Bf16;
                $body
            }
            $crate::attention::element::ElementType::I8 => {
                type $name = i8;
                $body
            }
        }
    };
}
pub(crate) use by_element;
