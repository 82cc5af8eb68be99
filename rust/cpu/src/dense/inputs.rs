//! A linear layer's inputs, as the kernels for plain weights read them.
//!
//! Rows lie in blocks of up to 8. Within a block, for each step over the inputs, the words of each row
//! lie side by side, so that a kernel finds all it needs at fixed distances.
#![expect(unsafe_code, reason = "rows are rounded through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::panel;
use crate::activations::RowSource;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::rows;
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch};

/// What a word is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// One input, float32. Rows of an odd number of inputs have a zero more.
    #[default]
    Floats,
    /// Two inputs, rounded to bfloat16: the nearest, ties to even. The last may be a zero more.
    Bf16Pairs,
}

impl Form {
    fn words(self, columns: usize) -> usize {
        match self {
            Self::Floats => columns.next_multiple_of(2),
            Self::Bf16Pairs => columns.div_ceil(2),
        }
    }
}

/// Prepared rows; the memory is reused from call to call.
#[derive(Default)]
pub struct Inputs {
    words: Vec<u32>,
    form: Form,
    rows: usize,
    columns: usize,
    /// Rows of all blocks but the last, which may have fewer.
    height: usize,
}

/// Rows that are multiplied together.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// The first row.
    pub first: usize,
    /// How many there are.
    pub rows: usize,
    /// The words.
    pub words: *const u32,
}

impl Inputs {
    /// Prepares all rows. `input` gives each, in order, the buffer to be used or another slice.
    pub fn fill<'a>(
        &mut self,
        isa: Isa,
        pool: &Pool,
        (form, rows, columns): (Form, usize, usize),
        input: &(dyn Fn(usize, &mut Vec<f32>) -> RowSource<'a> + Sync),
    ) {
        let blocks = rows.div_ceil(panel::height(isa));
        self.height = rows.div_ceil(blocks.max(1));
        (self.form, self.rows, self.columns) = (form, rows, columns);
        let width = form.words(columns);
        self.words.resize(rows * width, 0);
        let words = SharedMut::new(&mut self.words);
        let height = self.height;
        let round = dispatch!(isa, round_row(row: &[f32], out: &mut [u32]));
        rows::share(pool, blocks, height * columns, &|block| {
            let first = block * height;
            let count = height.min(rows - first);
            let target = words.part(first * width, count * width);
            let (mut buffer, mut pairs) = (Vec::new(), Vec::new());
            for index in 0..count {
                let row = match input(first + index, &mut buffer) {
                    RowSource::Slice(row) => row,
                    RowSource::Buffer => &buffer,
                };
                match form {
                    Form::Floats => spread(
                        row.iter().map(|x| x.to_bits()).chain([0]),
                        count,
                        &mut target[index..],
                    ),
                    Form::Bf16Pairs => {
                        pairs.resize(width.next_multiple_of(LANES / 2), 0);
                        // SAFETY: the instructions of `isa` are there, and the lengths agree.
                        unsafe { round(row, &mut pairs) };
                        spread(pairs[..width].iter().copied(), count, &mut target[index..]);
                    }
                }
            }
        });
    }

    /// Inputs of a row.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// What the words are.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.rows.div_ceil(self.height.max(1))
    }

    /// A block.
    pub(super) fn block(&self, index: usize) -> Block {
        let first = index * self.height;
        let words = &self.words[first * self.form.words(self.columns)..];
        Block {
            first,
            rows: self.height.min(self.rows - first),
            words: words.as_ptr(),
        }
    }
}

/// Writes a row's words, `count` apart.
fn spread(words: impl Iterator<Item = u32>, count: usize, to: &mut [u32]) {
    for (word, to) in words.zip(to.iter_mut().step_by(count)) {
        *to = word;
    }
}

/// A row as pairs of bfloat16, zeros behind it.
#[inline(always)]
unsafe fn round_row<V: Vector>(row: &[f32], out: &mut [u32]) {
    // SAFETY: the caller's promise: `out` is whole vectors.
    unsafe {
        for start in (0..row.len()).step_by(LANES) {
            let part = rows::load::<V>(row, start);
            part.store_bf16(out[start / 2..][..LANES / 2].as_mut_ptr().cast());
        }
    }
}
