//! One wide panel of weights times one block of rows: the job, who does it, and in what order.
#![expect(unsafe_code, reason = "results are written through pointers")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::inputs::{Block, Form};
use super::{DenseType, widened};
use crate::attention::element::Bf16;
use crate::isa::Isa;
use crate::layout::ALIGNMENT;
use crate::simd::{Vector, prefetch};
use crate::tile::Output;

/// Rows of a block, at most.
pub(super) const ROWS: usize = 8;

/// One wide panel times one block of rows.
pub(super) struct PanelJob {
    /// The panel's words.
    pub weights: *const u32,
    /// Steps over the inputs: words of an output.
    pub steps: usize,
    /// Vectors of outputs that are multiplied at a time: 1 or 2.
    pub vectors: usize,
    /// Where the bytes lie that are fetched meanwhile; the address need not be good for anything.
    pub ahead: *const u8,
    /// How many of those bytes belong to a step.
    pub ahead_step: usize,
    /// The rows.
    pub block: Block,
    /// Where the results of the panel's halves go. The second may be missing.
    pub outputs: [Option<Output>; 2],
}

impl PanelJob {
    /// Has a step's part of the bytes ahead fetched.
    #[inline(always)]
    pub fn fetch(&self, step: usize) {
        let place = self.ahead.wrapping_add(step * self.ahead_step);
        prefetch(place);
        prefetch(place.wrapping_add(ALIGNMENT));
    }

    /// Writes a row's results for a half of the panel.
    ///
    /// # Safety
    ///
    /// The instructions of `V` must be enabled, and the half's pointers good for the row.
    #[inline(always)]
    pub unsafe fn write<V: Vector>(&self, half: usize, row: usize, results: V) {
        if let Some(output) = &self.outputs[half] {
            // SAFETY: the caller's promise.
            unsafe { output.write(row, results) };
        }
    }
}

/// A kernel. Its instructions must be there, and the job's pointers good for its sizes.
pub(super) type Kernel = unsafe fn(&PanelJob);

/// The kernel for weights of a kind and inputs of a form.
pub(super) fn kernel(isa: Isa, kind: DenseType, form: Form) -> Kernel {
    match (kind, form) {
        #[cfg(target_arch = "x86_64")]
        (DenseType::Bf16, Form::Bf16Pairs) => super::bf16::multiply,
        (DenseType::Bf16, _) => widened::kernel::<Bf16>(isa),
        (DenseType::F32, _) => widened::kernel::<f32>(isa),
    }
}

/// How many rows a block may have, so that their sums stay in registers.
pub(super) fn height(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => ROWS,
        // With one vector of outputs, these and a vector of weights fill 15 of AVX2's 16 registers, 29
        // of NEON's 32.
        _ => 6,
    }
}

/// How many vectors of outputs are multiplied at a time with a block of so many rows. With few rows,
/// both halves of a panel: its lines should come from memory in their order.
pub(super) fn vectors(isa: Isa, rows: usize) -> usize {
    if isa == Isa::Avx512 || rows <= 3 {
        2
    } else {
        1
    }
}

/// `$body` with a number from 1 to [`ROWS`] as the constant `$name`.
macro_rules! by_count {
    ($count:expr, |$name:ident| $body:expr) => {
        by_count!(@arms $count, $name, $body, 1 2 3 4 5 6 7 8)
    };
    (@arms $count:expr, $name:ident, $body:expr, $($number:literal)*) => {
        match $count {
            $($number => {
                const $name: usize = $number;
                $body
            })*
            _ => unreachable!("blocks have 1 to 8 rows"),
        }
    };
}
pub(super) use by_count;
