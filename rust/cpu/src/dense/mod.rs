//! Matrices in float32 or bfloat16, packed for the kernels.
//!
//! 32 outputs form a wide panel, two vectors of 16. It is made of words of 32 bits: for each float32
//! input, or each two bfloat16 inputs side by side, the words of the 32 outputs. A last input without
//! a neighbour has zeros beside it. Where the processor multiplies pairs of bfloat16, inputs are
//! rounded to it and multiplied as they are ([`bf16`]); elsewhere, and for float32, products are
//! float32 and weights are widened in the register ([`widened`]). Sums are float32.
#![expect(unsafe_code, reason = "tasks call kernels over raw memory")]

#[cfg(target_arch = "x86_64")]
mod bf16;
pub mod inputs;
mod panel;
mod widened;

use crate::arena::WeightBytes;
use crate::error::PackError;
use crate::half::bf16_to_f32;
use crate::isa::Isa;
use crate::layout::PANEL;
use crate::outputs::Outputs;
use crate::pool::{Pool, shares};
use crate::shared::SharedMut;
use inputs::{Form, Inputs};
use panel::{Kernel, PanelJob};

/// Outputs of a wide panel.
const WIDTH: usize = 2 * PANEL;

/// Bytes of a word: one float32, or two bfloat16.
const WORD: usize = 4;

/// How many bytes ahead weights are fetched where they are used once: more than a page, where hardware
/// stops.
const AHEAD: usize = 4096;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseType {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
}

impl DenseType {
    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// How many of them a word holds.
    fn per_word(self) -> usize {
        WORD / self.size()
    }
}

/// Weights [rows, columns], row by row the outputs of a linear layer.
pub struct DenseMatrix {
    kind: DenseType,
    rows: usize,
    columns: usize,
    bytes: WeightBytes,
}

impl DenseMatrix {
    /// Packs `data`, row by row in this machine's byte order.
    pub fn new(
        kind: DenseType,
        data: &[u8],
        rows: usize,
        columns: usize,
        pool: &Pool,
    ) -> Result<Self, PackError> {
        let size = kind.size();
        let steps = columns.div_ceil(kind.per_word());
        let padded = rows
            .checked_next_multiple_of(WIDTH)
            .and_then(|rows| rows.checked_mul(steps));
        let Some(words) = padded.filter(|n| *n > 0 && *n < isize::MAX as usize / 8) else {
            return Err(PackError::Shape { rows, columns });
        };
        let expected = rows * columns * size;
        if data.len() != expected {
            return Err(PackError::Length {
                rows,
                columns,
                unit: "bytes",
                expected,
                got: data.len(),
            });
        }
        let mut bytes = WeightBytes::new(words * WORD)?;
        let panel_bytes = steps * WIDTH * WORD;
        let panels = SharedMut::new(bytes.as_mut_slice());
        pool.run(rows.div_ceil(WIDTH), &|panel| {
            let target = panels.part(panel * panel_bytes, panel_bytes);
            for output in 0..WIDTH.min(rows - panel * WIDTH) {
                let row = &data[(panel * WIDTH + output) * columns * size..][..columns * size];
                for (step, word) in row.chunks(WORD).enumerate() {
                    target[(step * WIDTH + output) * WORD..][..word.len()].copy_from_slice(word);
                }
            }
        });
        Ok(Self {
            kind,
            rows,
            columns,
            bytes,
        })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that the weights take.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Words of a row.
    fn steps(&self) -> usize {
        self.columns.div_ceil(self.kind.per_word())
    }

    fn panel(&self, panel: usize) -> &[u8] {
        let size = self.steps() * WIDTH * WORD;
        &self.bytes.as_slice()[panel * size..][..size]
    }

    /// The row's weights as float32.
    ///
    /// Panics if the row does not exist or `out` is not that long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns);
        let (panel, output) = (self.panel(row / WIDTH), row % WIDTH);
        let words = panel[output * WORD..].chunks(WIDTH * WORD);
        for (word, values) in words.zip(out.chunks_mut(self.kind.per_word())) {
            for (value, bytes) in values.iter_mut().zip(word.chunks_exact(self.kind.size())) {
                *value = match *bytes {
                    [a, b] => bf16_to_f32(u16::from_ne_bytes([a, b])),
                    [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
                    _ => unreachable!("weights have 2 or 4 bytes"),
                };
            }
        }
    }

    /// How inputs must lie to be multiplied with these weights.
    pub(crate) fn form(&self, isa: Isa) -> Form {
        if self.kind == DenseType::Bf16 && isa.multiplies_bf16() {
            Form::Bf16Pairs
        } else {
            Form::Floats
        }
    }

    /// All rows of `inputs` times the weights.
    pub(crate) fn multiply(&self, isa: Isa, pool: &Pool, inputs: &Inputs, outputs: &Outputs<'_>) {
        assert_eq!(inputs.columns(), self.columns);
        let kernel = panel::kernel(isa, self.kind, inputs.form());
        let shares = shares(self.rows.div_ceil(WIDTH), pool.threads());
        pool.run(shares.len(), &|task| {
            for panel in shares[task].clone() {
                self.multiply_panel(isa, kernel, panel, inputs, outputs);
            }
        });
    }

    /// A panel is read once for all rows. Meanwhile what lies behind is fetched: some lines ahead if
    /// there is one block of rows, else the next panel, each block a part of it.
    fn multiply_panel(
        &self,
        isa: Isa,
        kernel: Kernel,
        panel: usize,
        inputs: &Inputs,
        outputs: &Outputs<'_>,
    ) {
        let weights = self.panel(panel);
        let (blocks, steps) = (inputs.blocks(), self.steps());
        let halves = (self.rows - panel * WIDTH).div_ceil(PANEL);
        for index in 0..blocks {
            let block = inputs.block(index);
            let part = weights.len() / blocks;
            let distance = if blocks == 1 {
                AHEAD
            } else {
                weights.len() + index * part
            };
            let output =
                |half| (half < halves).then(|| outputs.panel(2 * panel + half, block.first));
            let job = PanelJob {
                weights: weights.as_ptr().cast(),
                steps,
                vectors: panel::vectors(isa, block.rows),
                ahead: weights.as_ptr().wrapping_add(distance),
                ahead_step: WIDTH * WORD / blocks,
                block,
                outputs: [output(0), output(1)],
            };
            // SAFETY: the instructions of `isa` are there, and the sizes agree.
            unsafe { kernel(&job) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activations::RowSource;

    /// Both forms of inputs give the same sums where these are exact: of small integers.
    #[test]
    fn weights_in_pairs_are_widened_where_nothing_multiplies_them() {
        let (outputs, columns, rows) = (49, 37, 11);
        let number = |place: usize| (place * 7919 % 23) as f32 - 11.0;
        let weight = |place: usize| crate::half::f32_to_bf16(number(place + 5)).to_ne_bytes();
        let bytes: Vec<u8> = (0..outputs * columns).flat_map(weight).collect();
        let input: Vec<f32> = (0..rows * columns).map(number).collect();
        let pool = Pool::new(2);
        let matrix = DenseMatrix::new(DenseType::Bf16, &bytes, outputs, columns, &pool)
            .expect("a sound shape");
        let expected: Vec<f32> = (0..rows * outputs)
            .map(|place| {
                let (row, output) = (place / outputs, place % outputs);
                let products = (0..columns)
                    .map(|k| number(row * columns + k) * number(output * columns + k + 5));
                products.sum()
            })
            .collect();
        for isa in Isa::available() {
            for form in [Form::Floats, matrix.form(isa)] {
                let mut inputs = Inputs::default();
                inputs.fill(isa, &pool, (form, rows, columns), &|row, _| {
                    RowSource::Slice(&input[row * columns..][..columns])
                });
                let mut out = vec![f32::NAN; rows * outputs];
                let target = Outputs {
                    start: out.as_mut_ptr(),
                    stride: outputs,
                    columns: outputs,
                    accumulate: false,
                    bias: None,
                };
                matrix.multiply(isa, &pool, &inputs, &target);
                assert_eq!(out, expected, "{isa:?} {form:?}");
            }
        }
    }
}
