//! The token of one row.

use super::Parameters;
use super::candidates;
use super::row::{BLOCK, Peak, RowView, Scale, Scratch, weigh};
use crate::isa::Isa;

/// The middle of the interval of 2^-24 that a number stands for: a token at the front that is all but
/// impossible is not drawn once in 2^24 times.
const HALF_STEP: f64 = 1.0 / (1 << 25) as f64;

/// One row's parameters.
struct Filters {
    temperature: f32,
    /// 0 for off; less than the vocabulary.
    top_k: usize,
    top_p: f64,
    min_p: f32,
    /// The part of the distribution before the token.
    share: f64,
}

impl Filters {
    fn scale(&self, peak: Peak) -> Scale {
        Scale {
            peak: peak.value,
            temperature: self.temperature,
        }
    }
}

/// The row's token; -1 if it has no distribution.
pub fn draw(
    isa: Isa,
    row: &RowView<'_>,
    parameters: &Parameters<'_>,
    index: usize,
    scratch: &mut Scratch,
) -> i32 {
    let peak = row.peak(isa, &mut scratch.maxima);
    if peak.is_bad {
        return -1;
    }
    let top_k = usize::try_from(parameters.top_k[index]).unwrap_or(0);
    let filters = Filters {
        temperature: parameters.temperature[index],
        top_k: if top_k < row.logits.len() { top_k } else { 0 },
        top_p: f64::from(parameters.top_p[index]),
        min_p: parameters.min_p[index],
        share: f64::from(parameters.uniform[index]) + HALF_STEP,
    };
    // Without one finite logit there is nothing to draw from either.
    let token = if filters.temperature <= parameters.greedy || peak.value == f32::NEG_INFINITY {
        peak.token
    } else if filters.top_k == 0 && filters.top_p >= 1.0 && filters.min_p <= 0.0 {
        by_id(isa, row, peak, &filters, scratch)
    } else {
        by_rank(isa, row, peak, &filters, scratch)
    };
    token as i32
}

/// Among all tokens, in the order of their ids.
fn by_id(
    isa: Isa,
    row: &RowView<'_>,
    peak: Peak,
    filters: &Filters,
    scratch: &mut Scratch,
) -> usize {
    let scale = filters.scale(peak);
    let total = row.weigh(isa, scale, &mut scratch.sums);
    let (block, target) = first_above(&scratch.sums, filters.share * total);
    scratch.weights.clear();
    scratch.weights.extend_from_slice(&row.block(isa, block));
    weigh(isa, scale, &mut scratch.weights);
    block * BLOCK + first_above(&scratch.weights, target).0
}

/// The first place at which the sum passes the target, and what of the target lies in it. Where rounding
/// lifts the target to the end, the last place that adds to the sum.
fn first_above(parts: &[f32], target: f64) -> (usize, f64) {
    let (mut sum, mut last) = (0.0, (0, 0.0));
    for (place, part) in parts.iter().enumerate() {
        let with = sum + f64::from(*part);
        if with > sum {
            last = (place, target - sum);
        }
        if with > target {
            break;
        }
        sum = with;
    }
    last
}

/// Among the tokens that the filters keep, likeliest first.
fn by_rank(
    isa: Isa,
    row: &RowView<'_>,
    peak: Peak,
    filters: &Filters,
    scratch: &mut Scratch,
) -> usize {
    let scale = filters.scale(peak);
    // What top_p is a share of, where that is the whole distribution.
    let whole = (filters.top_k == 0 && filters.min_p <= 0.0)
        .then(|| row.weigh(isa, scale, &mut scratch.sums));
    let mut found = peak.token;
    candidates::search(isa, row, scratch, filters.top_k, |scratch, is_row| {
        scratch.sort(filters.top_k);
        scratch.weights.clear();
        let logits = scratch.candidates.iter().map(|candidate| candidate.logit());
        scratch.weights.extend(logits);
        weigh(isa, scale, &mut scratch.weights);
        let is_complete = is_row || scratch.candidates.len() == filters.top_k;
        match place(&scratch.weights, filters, whole, is_complete) {
            Some(place) => {
                found = scratch.candidates[place].token();
                true
            }
            None => false,
        }
    });
    found
}

/// Which of the likeliest tokens is drawn; None if the list is too short to say. `is_complete`: it holds
/// every token that may be kept.
fn place(
    weights: &[f32],
    filters: &Filters,
    whole: Option<f64>,
    is_complete: bool,
) -> Option<usize> {
    let is_kept = |weight: &&f32| **weight > 0.0 && **weight >= filters.min_p;
    let kept = weights.iter().take_while(is_kept).count();
    let ends = is_complete || kept < weights.len();
    let weights = &weights[..kept];
    let sum = || weights.iter().map(|weight| f64::from(*weight)).sum();
    let mass: f64 = if ends { sum() } else { whole? };
    let (mut nucleus, mut size) = (0.0, 0);
    for weight in weights {
        if nucleus >= filters.top_p * mass {
            break;
        }
        nucleus += f64::from(*weight);
        size += 1;
    }
    if size == kept && !ends {
        return None;
    }
    Some(first_above(&weights[..size], filters.share * nucleus).0)
}
