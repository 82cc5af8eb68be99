//! Matrices in float32 or bfloat16, packed for the kernels.
//!
//! As in [`layout`](crate::layout), 16 outputs form a panel; a panel holds, for each input, the 16
//! weights. Products and sums are float32: a bfloat16 weight is widened in the register.
#![expect(
    unsafe_code,
    reason = "tasks write columns of one output, through vectors"
)]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]
#![expect(
    clippy::needless_range_loop,
    reason = "indices are unrolled early enough for the compiler to keep arrays in registers"
)]

use crate::attention::element::{Bf16, Element};
use crate::error::PackError;
use crate::half::bf16_to_f32;
use crate::isa::Isa;
use crate::layout::PANEL;
use crate::memory::AlignedBytes;
use crate::outputs::Outputs;
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Vector, dispatch, prefetch};
use crate::tile::Output;

/// Rows at a time: their sums stay in registers, and a panel is read once for all of them.
const ROWS: usize = 8;

/// How many bytes ahead weights are fetched: more than a page, where hardware stops.
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
}

/// Weights [rows, columns], row by row the outputs of a linear layer.
pub struct DenseMatrix {
    kind: DenseType,
    rows: usize,
    columns: usize,
    bytes: AlignedBytes,
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
        let padded = rows
            .checked_next_multiple_of(PANEL)
            .and_then(|rows| rows.checked_mul(columns));
        let Some(length) = padded.filter(|n| *n > 0 && *n < isize::MAX as usize / 8) else {
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
        let mut bytes = AlignedBytes::new(length * size);
        let panel_bytes = PANEL * columns * size;
        let panels = SharedMut::new(bytes.as_mut_slice());
        pool.run(rows.div_ceil(PANEL), &|panel| {
            let target = panels.part(panel * panel_bytes, panel_bytes);
            for output in 0..PANEL.min(rows - panel * PANEL) {
                let row = &data[(panel * PANEL + output) * columns * size..][..columns * size];
                for (input, weight) in row.chunks_exact(size).enumerate() {
                    target[(input * PANEL + output) * size..][..size].copy_from_slice(weight);
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

    fn panel(&self, panel: usize) -> &[u8] {
        let size = PANEL * self.columns * self.kind.size();
        &self.bytes.as_slice()[panel * size..][..size]
    }

    /// The row's weights as float32.
    ///
    /// Panics if the row does not exist or `out` is not that long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns);
        let (panel, output) = (self.panel(row / PANEL), row % PANEL);
        for (input, value) in out.iter_mut().enumerate() {
            let place = input * PANEL + output;
            *value = match self.kind {
                DenseType::F32 => {
                    let bytes = &panel[4 * place..][..4];
                    f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
                }
                DenseType::Bf16 => {
                    bf16_to_f32(u16::from_ne_bytes([panel[2 * place], panel[2 * place + 1]]))
                }
            };
        }
    }

    /// `rows` rows of `input` times the weights.
    pub(crate) fn multiply(
        &self,
        isa: Isa,
        pool: &Pool,
        input: &[f32],
        rows: usize,
        outputs: &Outputs<'_>,
    ) {
        assert_eq!(input.len(), rows * self.columns);
        let kernel = dispatch!(isa, multiply_panel(job: &PanelJob<'_>));
        let (panels, step) = outputs.panels(pool);
        pool.run(panels.div_ceil(step), &|task| {
            for panel in task * step..(task * step + step).min(panels) {
                for first in (0..rows).step_by(ROWS) {
                    let count = ROWS.min(rows - first);
                    let job = PanelJob {
                        kind: self.kind,
                        weights: self.panel(panel),
                        input: &input[first * self.columns..][..count * self.columns],
                        columns: self.columns,
                        output: outputs.panel(panel, first),
                    };
                    // SAFETY: the instructions of `isa` are there, and the sizes agree.
                    unsafe { kernel(&job) };
                }
            }
        });
    }
}

struct PanelJob<'a> {
    kind: DenseType,
    weights: &'a [u8],
    input: &'a [f32],
    columns: usize,
    output: Output,
}

#[inline(always)]
unsafe fn multiply_panel<V: Vector>(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.input.len() / job.columns {
            1 => multiply_rows::<V, 1>(job),
            2 => multiply_rows::<V, 2>(job),
            3 => multiply_rows::<V, 3>(job),
            4 => multiply_rows::<V, 4>(job),
            5 => multiply_rows::<V, 5>(job),
            6 => multiply_rows::<V, 6>(job),
            7 => multiply_rows::<V, 7>(job),
            _ => multiply_rows::<V, ROWS>(job),
        }
    }
}

#[inline(always)]
unsafe fn multiply_rows<V: Vector, const COUNT: usize>(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.kind {
            DenseType::F32 => multiply_with::<V, f32, COUNT>(job),
            DenseType::Bf16 => multiply_with::<V, Bf16, COUNT>(job),
        }
    }
}

#[inline(always)]
unsafe fn multiply_with<V: Vector, E: Element, const COUNT: usize>(job: &PanelJob<'_>) {
    let (weights, columns) = (job.weights.as_ptr().cast::<E>(), job.columns);
    // SAFETY: COUNT rows of `columns` inputs, and 16 weights for each input.
    unsafe {
        let mut sums = [V::splat(0.0); COUNT];
        let rows = job.input.as_ptr();
        for input in 0..columns {
            let place = weights.wrapping_add(input * PANEL);
            prefetch(place.wrapping_byte_add(AHEAD));
            let weight = E::load::<V>(place);
            for row in 0..COUNT {
                let value = V::splat(*rows.add(row * columns + input));
                sums[row] = value.fma(weight, sums[row]);
            }
        }
        for (row, sum) in sums.into_iter().enumerate() {
            job.output.write(row, sum);
        }
    }
}
