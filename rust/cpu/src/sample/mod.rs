//! Choosing the next token of each row of logits, and its log probability.
//!
//! The steps and their order are those of `miniinfer.sampling`: edits, masks, temperature, `min_p`,
//! `top_k`, `top_p`; then the token at which the cumulative distribution passes the row's number. A row
//! is read in blocks of 64 logits. Their maxima say which blocks can hold the greatest logits, so that
//! no vocabulary is sorted unless the filters keep most of it. A row depends on nothing but itself.

mod candidates;
mod draw;
mod logprobs;
mod row;

use crate::isa::Isa;
use crate::pool::Pool;
use crate::shared::SharedMut;
use row::{Mask, RowView, Scratch};
use std::cell::RefCell;

/// What rows are drawn by: an element for each row.
#[derive(Clone, Copy)]
pub struct Parameters<'a> {
    /// Up to `greedy` the row takes its greatest logit.
    pub temperature: &'a [f32],
    /// 0 or less, and the vocabulary's size or more, for off.
    pub top_k: &'a [i32],
    /// 1 for off.
    pub top_p: &'a [f32],
    /// 0 for off.
    pub min_p: &'a [f32],
    /// In [0, 1).
    pub uniform: &'a [f32],
    /// The temperature up to which a row is greedy.
    pub greedy: f32,
}

/// Changes to single logits, each pair of row and token at most once.
#[derive(Clone, Copy, Default)]
pub struct Edits<'a> {
    /// The rows.
    pub sample: &'a [i32],
    /// The tokens.
    pub token: &'a [i32],
    /// Divides a positive logit, multiplies another.
    pub repetition: &'a [f32],
    /// Then added.
    pub bias: &'a [f32],
}

/// The tokens that some of the rows may choose from.
#[derive(Clone, Copy, Default)]
pub struct Masks<'a> {
    /// The rows, ascending and distinct.
    pub rows: &'a [i32],
    /// [rows, words]: bit b of word w is set if token 32 w + b is allowed.
    pub bits: &'a [i32],
    /// Words of a row: enough for the vocabulary.
    pub words: usize,
}

/// Rows of logits and what is to be done with them.
pub struct Batch<'a> {
    /// Row by row; edits are made here and undone.
    pub logits: &'a mut [f32],
    /// From one row to the next.
    pub stride: usize,
    /// Logits of a row that count; what follows is padding.
    pub vocabulary: usize,
    /// By which rows are drawn.
    pub parameters: Parameters<'a>,
    /// Changes to single logits.
    pub edits: Edits<'a>,
    /// What rows may choose.
    pub masks: Masks<'a>,
}

/// Where log probabilities go: those of the model, before edits, masks and filters.
pub struct Logprobs<'a> {
    /// For each row, that of its token.
    pub logprob: &'a mut [f32],
    /// 1 and how many tokens are likelier.
    pub rank: &'a mut [i32],
    /// [rows, count]: the likeliest tokens, equal ones by id.
    pub top_ids: &'a mut [i32],
    /// [rows, count]: theirs.
    pub top_logprobs: &'a mut [f32],
    /// How many tokens; at most the vocabulary.
    pub count: usize,
}

/// What is wrong with a batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// Arrays that do not belong together.
    #[error("{what} has {got} elements, expected {expected}")]
    Length {
        /// Which array.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length that the others ask for.
        expected: usize,
    },
    /// A row or token that does not exist.
    #[error("{what} {got} is not below {limit}")]
    Range {
        /// Row or token, and of what.
        what: &'static str,
        /// Its number.
        got: i32,
        /// How many there are.
        limit: usize,
    },
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Chooses a token for each row; -1 where a logit is +inf or not a number.
pub fn sample(
    isa: Isa,
    pool: &Pool,
    batch: &mut Batch<'_>,
    sampled: &mut [i32],
    logprobs: Option<&mut Logprobs<'_>>,
) -> Result<(), SampleError> {
    check(batch, sampled.len(), logprobs.as_deref())?;
    let originals = apply_edits(batch);
    {
        let chosen = SharedMut::new(&mut *sampled);
        let batch = &*batch;
        pool.run(batch.parameters.temperature.len(), &|index| {
            let view = RowView {
                logits: &batch.logits[index * batch.stride..][..batch.vocabulary],
                mask: batch.masks.of(index),
            };
            let token = SCRATCH.with_borrow_mut(|scratch| {
                draw::draw(isa, &view, &batch.parameters, index, scratch)
            });
            chosen.part(index, 1)[0] = token;
        });
    }
    undo_edits(batch, &originals);
    if let Some(logprobs) = logprobs {
        report(isa, pool, batch, sampled, logprobs);
    }
    Ok(())
}

fn report(isa: Isa, pool: &Pool, batch: &Batch<'_>, sampled: &[i32], logprobs: &mut Logprobs<'_>) {
    let count = logprobs.count;
    let logprob = SharedMut::new(&mut *logprobs.logprob);
    let rank = SharedMut::new(&mut *logprobs.rank);
    let top_ids = SharedMut::new(&mut *logprobs.top_ids);
    let top_logprobs = SharedMut::new(&mut *logprobs.top_logprobs);
    pool.run(sampled.len(), &|index| {
        let view = RowView {
            logits: &batch.logits[index * batch.stride..][..batch.vocabulary],
            mask: None,
        };
        let mut out = logprobs::Out {
            logprob: &mut logprob.part(index, 1)[0],
            rank: &mut rank.part(index, 1)[0],
            top_ids: top_ids.part(index * count, count),
            top_logprobs: top_logprobs.part(index * count, count),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            logprobs::logprobs(isa, &view, sampled[index], scratch, &mut out);
        });
    });
}

impl<'a> Masks<'a> {
    fn of(&self, row: usize) -> Option<Mask<'a>> {
        let place = self.rows.binary_search(&(row as i32)).ok()?;
        Some(Mask(&self.bits[place * self.words..][..self.words]))
    }
}

fn apply_edits(batch: &mut Batch<'_>) -> Vec<f32> {
    let Edits {
        sample,
        token,
        repetition,
        bias,
    } = batch.edits;
    let mut originals = Vec::with_capacity(token.len());
    for index in 0..token.len() {
        let place = sample[index] as usize * batch.stride + token[index] as usize;
        let logit = batch.logits[place];
        originals.push(logit);
        let scaled = if logit > 0.0 {
            logit / repetition[index]
        } else {
            logit * repetition[index]
        };
        batch.logits[place] = scaled + bias[index];
    }
    originals
}

fn undo_edits(batch: &mut Batch<'_>, originals: &[f32]) {
    for (index, logit) in originals.iter().enumerate() {
        let (sample, token) = (batch.edits.sample[index], batch.edits.token[index]);
        batch.logits[sample as usize * batch.stride + token as usize] = *logit;
    }
}

fn check(
    batch: &Batch<'_>,
    sampled: usize,
    logprobs: Option<&Logprobs<'_>>,
) -> Result<(), SampleError> {
    let (parameters, edits, masks) = (&batch.parameters, &batch.edits, &batch.masks);
    let rows = parameters.temperature.len();
    let edited = edits.token.len();
    let mut lengths = vec![
        ("top_k", parameters.top_k.len(), rows),
        ("top_p", parameters.top_p.len(), rows),
        ("min_p", parameters.min_p.len(), rows),
        ("uniform", parameters.uniform.len(), rows),
        ("sampled", sampled, rows),
        ("edit_sample", edits.sample.len(), edited),
        ("edit_repetition", edits.repetition.len(), edited),
        ("edit_bias", edits.bias.len(), edited),
        (
            "mask bits",
            masks.bits.len(),
            masks.rows.len() * masks.words,
        ),
    ];
    if !masks.rows.is_empty() {
        let words = batch.vocabulary.div_ceil(32);
        lengths.push(("a mask", masks.words.min(words), words));
    }
    let needed = rows.saturating_sub(1) * batch.stride + batch.vocabulary.min(rows * batch.stride);
    lengths.push(("logits", batch.logits.len().min(needed), needed));
    if let Some(logprobs) = logprobs {
        lengths.extend([
            ("logprob", logprobs.logprob.len(), rows),
            ("rank", logprobs.rank.len(), rows),
            ("top_ids", logprobs.top_ids.len(), rows * logprobs.count),
            (
                "top_logprobs",
                logprobs.top_logprobs.len(),
                rows * logprobs.count,
            ),
            (
                "a list of tokens",
                logprobs.count.max(batch.vocabulary),
                batch.vocabulary,
            ),
        ]);
    }
    for (what, got, expected) in lengths {
        if got != expected {
            return Err(SampleError::Length {
                what,
                got,
                expected,
            });
        }
    }
    in_range("the row of an edit", edits.sample, rows)?;
    // The last row may end before its padding.
    let columns = batch.logits.len() - rows.saturating_sub(1) * batch.stride;
    in_range("the token of an edit", edits.token, columns)?;
    in_range("the row of a mask", masks.rows, rows)
}

fn in_range(what: &'static str, numbers: &[i32], limit: usize) -> Result<(), SampleError> {
    let is_outside = |number: &&i32| !usize::try_from(**number).is_ok_and(|n| n < limit);
    match numbers.iter().find(is_outside) {
        Some(number) => Err(SampleError::Range {
            what,
            got: *number,
            limit,
        }),
        None => Ok(()),
    }
}
