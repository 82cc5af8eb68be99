//! The innermost loops: one panel of weights times one tile of rows.
#![expect(unsafe_code, reason = "kernels read and write raw memory")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::activations::Tile;
use crate::isa::Isa;
use crate::layout::{Layout, PANEL};
use crate::simd::{LANES, Vector};

const _: () = assert!(PANEL == LANES, "a row of a panel's outputs is one vector");

/// One panel times one tile.
pub struct TileJob {
    /// The panel's bytes, at a cache line.
    pub panel: *const u8,
    /// The panel that comes next, to be fetched meanwhile, or null.
    pub next: *const u8,
    /// Groups of inputs.
    pub groups: usize,
    /// The rows.
    pub tile: Tile,
    /// Where the tile's results go.
    pub output: Output,
}

/// Where a tile's results go.
#[derive(Clone, Copy)]
pub struct Output {
    /// The first row's first output.
    pub start: *mut f32,
    /// From one row to the next, in floats.
    pub stride: usize,
    /// How many of the panel's outputs exist.
    pub lanes: usize,
    /// Whether results are added to what is there.
    pub accumulate: bool,
    /// 16 numbers to add, or null.
    pub bias: *const f32,
}

impl Output {
    /// Writes one row's results.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and the pointers good for the row's lanes.
    #[inline(always)]
    pub unsafe fn write<V: Vector>(&self, row: usize, result: V) {
        // SAFETY: the caller's promise.
        unsafe {
            let to = self.start.add(row * self.stride);
            let mut result = result;
            if !self.bias.is_null() {
                result = result.add(V::load(self.bias));
            }
            if self.lanes == LANES {
                if self.accumulate {
                    result = result.add(V::load(to));
                }
                result.store(to);
            } else {
                if self.accumulate {
                    result = result.add(V::load_first(to, self.lanes));
                }
                result.store_first(to, self.lanes);
            }
        }
    }
}

/// A kernel. Its instructions must be there, and the job's pointers good for its sizes.
pub type Kernel = unsafe fn(&TileJob);

/// The kernel for tiles of `width` rows.
pub fn kernel(isa: Isa, layout: Layout, width: usize) -> Kernel {
    debug_assert!((1..=crate::activations::TILE).contains(&width));
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::kernel(layout, width),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::kernel(layout),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => neon::dot_kernel(layout),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::kernel(layout),
        _ => portable::kernel(layout),
    }
}

/// `$name::<LAYOUT>` for a layout, its index in [`Layout::ALL`] as the constant.
macro_rules! by_layout {
    ($layout:expr, |$index:ident| $kernel:expr) => {{
        macro_rules! arm {
            ($number:literal) => {{
                const $index: usize = $number;
                $kernel
            }};
        }
        let place = Layout::ALL.iter().position(|layout| *layout == $layout);
        match place {
            Some(0) => arm!(0),
            Some(1) => arm!(1),
            Some(2) => arm!(2),
            Some(3) => arm!(3),
            Some(4) => arm!(4),
            Some(5) => arm!(5),
            Some(6) => arm!(6),
            Some(7) => arm!(7),
            _ => unreachable!("every layout is in the list"),
        }
    }};
}
use by_layout;
