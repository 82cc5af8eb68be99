//! Linear layers: activations times weights, with what comes before and after in the same call.

use crate::activations::Activations;
pub use crate::before::Before;
use crate::dense::DenseMatrix;
use crate::dense::inputs::Inputs;
use crate::isa::Isa;
use crate::layout::PANEL;
use crate::outputs::Outputs;
use crate::packed::PackedMatrix;
use crate::pool::Pool;
use crate::product::multiply;
use crate::profile::{self, clock};
use std::cell::RefCell;

/// Bytes of quantised rows that are multiplied with all of the weights at a time: they stay in a core's
/// L2 cache, beside a panel.
const ROW_BYTES: usize = 1 << 19;

/// Weights of one kind.
pub enum Part {
    /// Quantised.
    Quantized(PackedMatrix),
    /// float32 or bfloat16.
    Dense(DenseMatrix),
}

impl Part {
    fn rows(&self) -> usize {
        match self {
            Self::Quantized(matrix) => matrix.rows(),
            Self::Dense(matrix) => matrix.rows(),
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::Quantized(matrix) => matrix.columns(),
            Self::Dense(matrix) => matrix.columns(),
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::Quantized(matrix) => matrix.num_bytes(),
            Self::Dense(matrix) => matrix.num_bytes(),
        }
    }
}

/// `y = x W^T + b`: the weights in one or more parts, one below the other.
pub struct Linear {
    parts: Vec<Part>,
    /// For each part, padded to whole panels; empty without a bias.
    biases: Vec<Vec<f32>>,
    rows: usize,
    columns: usize,
}

/// What `Linear::new` refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinearError {
    /// No weights, or parts that differ in their inputs.
    #[error("the parts of a linear layer must have the same number of columns, got {0:?}")]
    Columns(Vec<usize>),
    /// A bias of another length.
    #[error("a bias for {rows} outputs has {got} elements")]
    Bias {
        /// Outputs.
        rows: usize,
        /// Elements of the bias.
        got: usize,
    },
}

#[derive(Default)]
struct Scratch {
    activations: Activations,
    dense: Inputs,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The rows of a call, and where its results go.
pub struct Call<'a> {
    /// Inputs, row by row.
    pub input: &'a [f32],
    /// Results, row by row.
    pub output: &'a mut [f32],
    /// What is done to each row first.
    pub before: Before<'a>,
    /// Whether results are added to what is there, as a residual connection does.
    pub accumulate: bool,
}

impl Linear {
    /// A layer of these weights.
    pub fn new(parts: Vec<Part>, bias: Option<&[f32]>) -> Result<Self, LinearError> {
        let widths: Vec<_> = parts.iter().map(Part::columns).collect();
        if widths.is_empty() || widths.iter().any(|width| *width != widths[0]) {
            return Err(LinearError::Columns(widths));
        }
        let rows = parts.iter().map(Part::rows).sum();
        let mut biases = Vec::new();
        if let Some(bias) = bias {
            if bias.len() != rows {
                return Err(LinearError::Bias {
                    rows,
                    got: bias.len(),
                });
            }
            let mut rest = bias;
            for part in &parts {
                let (own, others) = rest.split_at(part.rows());
                let mut own = own.to_vec();
                own.resize(own.len().next_multiple_of(PANEL), 0.0);
                biases.push(own);
                rest = others;
            }
        }
        Ok(Self {
            columns: widths[0],
            parts,
            biases,
            rows,
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

    /// Bytes of the weights.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(Part::num_bytes).sum()
    }

    /// Copies rows of the weights, as an embedding does: `out` gets a row for each index.
    ///
    /// Panics if an index is not below `rows()` or `out` has another length.
    pub fn gather(&self, indices: &[i32], out: &mut [f32]) {
        assert_eq!(out.len(), indices.len() * self.columns);
        for (index, out) in indices.iter().zip(out.chunks_exact_mut(self.columns)) {
            let mut row = usize::try_from(*index).unwrap_or(usize::MAX);
            let part = self.parts.iter().find(|part| {
                let found = row < part.rows();
                if !found {
                    row -= part.rows();
                }
                found
            });
            match part {
                Some(Part::Quantized(matrix)) => matrix.row(row, out),
                Some(Part::Dense(matrix)) => matrix.row(row, out),
                None => panic!("row {index} of {} was asked for", self.rows),
            }
        }
    }

    /// Computes all rows of a call.
    ///
    /// Panics if the slices are not whole rows, or not the same number of them.
    pub fn forward(&self, isa: Isa, pool: &Pool, call: &mut Call<'_>) {
        let width = call.before.input_columns(self.columns);
        let count = call.input.len() / width;
        assert_eq!(call.input.len(), count * width, "inputs must be whole rows");
        assert_eq!(
            call.output.len(),
            count * self.rows,
            "outputs must be whole rows"
        );
        if let Before::RmsNorm { weight, .. } = call.before {
            assert_eq!(
                weight.len(),
                self.columns,
                "a norm's weight must be as long as a row"
            );
        }
        let step = (ROW_BYTES / self.columns).max(32);
        SCRATCH.with_borrow_mut(|scratch| {
            for first in (0..count).step_by(step) {
                let rows = step.min(count - first);
                let mut block = Call {
                    input: &call.input[first * width..][..rows * width],
                    output: &mut call.output[first * self.rows..][..rows * self.rows],
                    ..*call
                };
                self.forward_block(isa, pool, scratch, &mut block, rows);
            }
        });
    }

    fn forward_block(
        &self,
        isa: Isa,
        pool: &Pool,
        scratch: &mut Scratch,
        call: &mut Call<'_>,
        rows: usize,
    ) {
        let width = call.before.input_columns(self.columns);
        let source = |row: usize, buffer: &mut Vec<f32>| {
            let row = &call.input[row * width..][..width];
            call.before.apply(isa, row, buffer)
        };
        let (mut prepared, mut spread) = (None, None);
        let mut start = 0;
        for (index, part) in self.parts.iter().enumerate() {
            let outputs = Outputs {
                start: call.output[start..].as_mut_ptr(),
                stride: self.rows,
                columns: part.rows(),
                accumulate: call.accumulate,
                bias: self.biases.get(index).map(Vec::as_slice),
            };
            match part {
                Part::Quantized(matrix) => {
                    let layout = matrix.layout();
                    if prepared != Some((layout.group(), layout.zero())) {
                        let inputs = &mut scratch.activations;
                        inputs.resize(layout, rows, self.columns);
                        clock(profile::Part::Inputs, || inputs.fill(isa, pool, &source));
                        prepared = Some((layout.group(), layout.zero()));
                    }
                    let inputs = &scratch.activations;
                    clock(profile::Part::Products, || {
                        multiply(isa, pool, inputs, matrix, &outputs);
                    });
                }
                Part::Dense(matrix) => {
                    let form = matrix.form(isa);
                    if spread != Some(form) {
                        let shape = (form, rows, self.columns);
                        clock(profile::Part::Inputs, || {
                            scratch.dense.fill(isa, pool, shape, &source);
                        });
                        spread = Some(form);
                    }
                    clock(profile::Part::Products, || {
                        matrix.multiply(isa, pool, &scratch.dense, &outputs);
                    });
                }
            }
            start += part.rows();
        }
    }
}
