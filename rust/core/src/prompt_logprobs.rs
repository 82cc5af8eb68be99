//! Log-probabilities of prompt tokens: which rows of logits they need, and what becomes of them.

use std::cell::Cell;
use std::ops::Range;

use crate::engine::Engine;
use crate::error::StepError;
use crate::request::{Request, RequestId};

/// The log-probabilities of a prompt's tokens but the first, flat.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprobs {
    /// The request.
    pub id: RequestId,
    /// Alternatives for each token.
    pub top_width: usize,
    /// The prompt's tokens from the second on, as far as they are known.
    pub tokens: Vec<u32>,
    /// Log-probability of each, natural logarithm.
    pub logprobs: Vec<f32>,
    /// Rank of each, from 1.
    pub ranks: Vec<u32>,
    /// `top_width` ids for each, likeliest first.
    pub top_ids: Vec<u32>,
    /// Their log-probabilities.
    pub top_logprobs: Vec<f32>,
}

/// What a forward pass found, R rows of K alternatives.
#[derive(Clone, Copy)]
pub struct PromptRows<'a> {
    /// \[R\] log-probability of each row's target.
    pub logprob: &'a [Cell<f32>],
    /// \[R\] its rank.
    pub rank: &'a [Cell<i32>],
    /// \[R, K\] the likeliest ids.
    pub top_ids: &'a [Cell<i32>],
    /// \[R, K\] their log-probabilities.
    pub top_logprobs: &'a [Cell<f32>],
}

impl Request {
    /// The positions, among `tokens` from `first` on, that predict a prompt token whose log-probability is
    /// wanted and not known yet.
    pub(crate) fn prompt_rows(&self, first: u32, tokens: u32) -> Range<u32> {
        let Some(known) = &self.prompt_logprobs else {
            return 0..0;
        };
        let from = first.max(known.tokens.len() as u32);
        from..(first + tokens).min(self.prompt_len - 1).max(from)
    }

    /// Tokens whose KV may come from the cache although the log-probabilities of the prompt are wanted: they
    /// need the logits of all positions that have not been computed before.
    pub(crate) fn reusable_tokens(&self) -> usize {
        match &self.prompt_logprobs {
            Some(known) if known.tokens.len() + 1 < self.prompt_len as usize => known.tokens.len(),
            _ => usize::MAX,
        }
    }
}

impl Engine {
    /// Of a planned step, each row of logits that a prompt's log-probabilities need: the index of its token in
    /// the step, and the token that follows it. The header says how many there are. Returns their number.
    pub fn prompt_rows(
        &self,
        slot: usize,
        index: &[Cell<i32>],
        target: &[Cell<i32>],
    ) -> Result<usize, StepError> {
        self.expect(slot, "prompt_rows", true)?;
        let room = index.len().min(target.len());
        let (mut at, mut first_token) = (0, 0);
        for planned in &self.slots[slot].planned {
            let request = self.table.get(planned.index);
            let rows = request.prompt_rows(request.computed, planned.tokens);
            check_length("prompt rows", at + rows.len(), room)?;
            for position in rows {
                index[at].set((first_token + position - request.computed) as i32);
                target[at].set(request.tokens[position as usize + 1] as i32);
                at += 1;
            }
            first_token += planned.tokens;
        }
        Ok(at)
    }

    /// Takes in the log-probabilities of the rows that [`Engine::prompt_rows`] named, in that order, before the
    /// step is committed.
    pub fn take_prompt_logprobs(
        &mut self,
        slot: usize,
        rows: &PromptRows<'_>,
    ) -> Result<(), StepError> {
        self.expect(slot, "take_prompt_logprobs", true)?;
        let (mut needed, mut most) = (0, 0);
        for entry in &self.slots[slot].planned {
            let request = self.table.get(entry.index);
            let wanted = request.prompt_rows(request.computed, entry.tokens).len();
            let known = request.prompt_logprobs.as_deref().filter(|_| wanted > 0);
            needed += wanted;
            most = known.map_or(most, |known| most.max(known.top_width));
        }
        check_length("logprob", needed, rows.logprob.len())?;
        check_length("rank", needed, rows.rank.len())?;
        let width = rows.top_ids.len().checked_div(needed).unwrap_or_default();
        check_length("top_ids", needed * most, rows.top_ids.len())?;
        check_length("top_logprobs", needed * width, rows.top_logprobs.len())?;
        let mut at = 0;
        for entry in &self.slots[slot].planned {
            let request = self.table.get_mut(entry.index);
            let wanted = request.prompt_rows(request.computed, entry.tokens);
            let Some(known) = request.prompt_logprobs.as_deref_mut() else {
                continue;
            };
            for position in wanted {
                known.tokens.push(request.tokens[position as usize + 1]);
                known.take(rows, at, width);
                at += 1;
            }
        }
        Ok(())
    }
}

impl PromptLogprobs {
    fn take(&mut self, rows: &PromptRows<'_>, at: usize, width: usize) {
        self.logprobs.push(rows.logprob[at].get());
        self.ranks.push(rows.rank[at].get() as u32);
        let top = at * width..at * width + self.top_width;
        let ids = rows.top_ids[top.clone()].iter().map(|id| id.get() as u32);
        self.top_ids.extend(ids);
        let logprobs = rows.top_logprobs[top].iter().map(Cell::get);
        self.top_logprobs.extend(logprobs);
    }
}

fn check_length(name: &'static str, needed: usize, actual: usize) -> Result<(), StepError> {
    if actual < needed {
        return Err(StepError::ArrayLength {
            name,
            needed,
            actual,
        });
    }
    Ok(())
}
