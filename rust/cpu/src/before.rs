//! What comes before a linear layer's product, row by row.

use crate::activations::RowSource;
use crate::isa::Isa;
use crate::rows;

/// What is done to a row before it is multiplied.
#[derive(Clone, Copy)]
pub enum Before<'a> {
    /// Nothing.
    Nothing,
    /// `RMSNorm` (Zhang and Sennrich, 2019) with a weight for each input.
    RmsNorm {
        /// One for each input.
        weight: &'a [f32],
        /// Added to the mean square.
        epsilon: f32,
    },
    /// `SiLU` of the first half of the row times the second: rows are twice as long as the weights'.
    SiluMul,
}

impl Before<'_> {
    /// Floats of an input row for a product over `columns`.
    pub(crate) fn input_columns(self, columns: usize) -> usize {
        if matches!(self, Self::SiluMul) {
            2 * columns
        } else {
            columns
        }
    }

    /// The row that is multiplied.
    pub(crate) fn apply<'a>(
        self,
        isa: Isa,
        row: &'a [f32],
        buffer: &mut Vec<f32>,
    ) -> RowSource<'a> {
        if matches!(self, Self::Nothing) {
            return RowSource::Slice(row);
        }
        let halves = self.input_columns(1);
        buffer.resize(row.len() / halves, 0.0);
        self.write(isa, row, buffer);
        RowSource::Buffer
    }

    fn write(self, isa: Isa, row: &[f32], out: &mut [f32]) {
        match self {
            Self::Nothing => out.copy_from_slice(row),
            Self::RmsNorm { weight, epsilon } => rows::rms_norm(isa, row, weight, epsilon, out),
            Self::SiluMul => rows::silu_mul(isa, row, out),
        }
    }
}
