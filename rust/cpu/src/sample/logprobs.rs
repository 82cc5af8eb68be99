//! The log probabilities of one row.

use super::candidates;
use super::row::{RowView, Scale, Scratch};
use crate::isa::Isa;

/// Where a row's go.
pub struct Out<'a> {
    /// The token's.
    pub logprob: &'a mut f32,
    /// 1 and how many tokens are likelier.
    pub rank: &'a mut i32,
    /// The likeliest tokens, equal ones by id.
    pub top_ids: &'a mut [i32],
    /// Theirs.
    pub top_logprobs: &'a mut [f32],
}

/// What the row says of `token`; not a number where it has no distribution.
pub fn logprobs(isa: Isa, row: &RowView<'_>, token: i32, scratch: &mut Scratch, out: &mut Out<'_>) {
    let peak = row.peak(isa, &mut scratch.maxima);
    let Ok(token) = usize::try_from(token) else {
        (*out.logprob, *out.rank) = (f32::NAN, 1);
        out.top_ids.fill(0);
        out.top_logprobs.fill(f32::NAN);
        return;
    };
    // Without a finite logit every log probability is -inf, and not -inf less -inf.
    let total = if peak.value == f32::NEG_INFINITY {
        0.0
    } else {
        let scale = Scale {
            peak: peak.value,
            temperature: 1.0,
        };
        let sum = row.weigh(isa, scale, &mut scratch.sums);
        (f64::from(peak.value) + sum.ln()) as f32
    };
    let logit = row.logits[token];
    *out.logprob = logit - total;
    *out.rank = row.count_above(isa, logit) as i32 + 1;
    let count = out.top_ids.len();
    if count == 0 {
        return;
    }
    candidates::search(isa, row, scratch, count, |scratch, _| {
        scratch.sort(count);
        let outs = out.top_ids.iter_mut().zip(out.top_logprobs.iter_mut());
        for ((id, logprob), candidate) in outs.zip(&scratch.candidates) {
            (*id, *logprob) = (candidate.token() as i32, candidate.logit() - total);
        }
        true
    });
}
