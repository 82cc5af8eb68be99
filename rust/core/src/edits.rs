//! Changes to a request's logits: penalties, biases and bans as sparse edits, and the limit that a mask sets.
//!
//! Kept per request as a table of the tokens concerned, so that a step exports what it must change and
//! no `[requests, vocabulary]` array of counts exists anywhere. The table follows the tokens, not the
//! blocks: preemption cannot disturb it. Where there is a mask, bans are taken out of that instead: it knows
//! whether a token would be left.

use std::cell::Cell;

use rustc_hash::FxHashMap;

use crate::grammar::{BadWords, Limit, TokenLimits, Verdict};
use crate::request::SamplingSpec;

/// One change: `logit = logit > 0 ? logit / repetition : logit * repetition; logit += bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitEdit {
    /// Token id, unique within a request's list.
    pub token: u32,
    /// Factor of the repetition penalty, 1 for none.
    pub repetition: f32,
    /// Bias, minus presence and frequency penalties; minus infinity bans the token.
    pub bias: f32,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    token: u32,
    bias: f32,
    /// Times generated.
    count: u32,
    in_prompt: bool,
    /// Banned until `min_tokens` were generated.
    ends: bool,
}

/// The tokens of one request whose logits differ from the model's.
pub struct LogitEdits {
    entries: Vec<Entry>,
    index: FxHashMap<u32, u32>,
    presence: f32,
    frequency: f32,
    repetition: f32,
    min_tokens: u32,
    /// Whether entries matter once `min_tokens` is reached.
    lasting: bool,
    counts: bool,
    bad_words: BadWords,
    limit: Option<Limit>,
}

impl LogitEdits {
    /// The table of a request, or `None` if its logits are never changed.
    pub fn new(
        prompt: &[u32],
        params: &SamplingSpec,
        limits: &TokenLimits,
        eos: &[u32],
    ) -> Option<Box<Self>> {
        let repeats = params.repetition_penalty.to_bits() != 1f32.to_bits();
        let counts = params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 || repeats;
        let lasting = counts || !params.logit_bias.is_empty();
        let limit = Limit::new(limits);
        let bans = params.min_tokens > 0 || !limits.bad_words.is_empty();
        if !lasting && !bans && limit.is_none() {
            return None;
        }
        let mut edits = Self {
            entries: Vec::new(),
            index: FxHashMap::default(),
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            repetition: params.repetition_penalty,
            min_tokens: params.min_tokens,
            lasting,
            counts,
            bad_words: limits.bad_words.clone(),
            limit,
        };
        for &(token, bias) in &params.logit_bias {
            edits.entry(token).bias += bias;
        }
        if repeats {
            for &token in prompt {
                edits.entry(token).in_prompt = true;
            }
        }
        if params.min_tokens > 0 {
            let own = params.stop_token_ids.iter();
            // A grammar ends with one even where they mean nothing else.
            let eos_ends = !params.ignore_eos || limits.grammar.is_some();
            for &token in own.chain(eos.iter().filter(|_| eos_ends)) {
                edits.entry(token).ends = true;
            }
        }
        Some(Box::new(edits))
    }

    fn entry(&mut self, token: u32) -> &mut Entry {
        let next = self.entries.len() as u32;
        let at = *self.index.entry(token).or_insert(next);
        if at == next {
            self.entries.push(Entry {
                token,
                ..Entry::default()
            });
        }
        &mut self.entries[at as usize]
    }

    /// Counts a generated token.
    pub fn count(&mut self, token: u32) {
        if self.counts {
            self.entry(token).count += 1;
        }
    }

    /// Whether a mask says which tokens may come next.
    pub fn is_masked(&self) -> bool {
        self.limit.as_ref().is_some_and(Limit::is_open)
    }

    /// The limit that a mask sets, if any.
    pub(crate) fn limit(&self) -> Option<&Limit> {
        self.limit.as_ref()
    }

    /// Takes note of a generated token, the last of `output`. Fails if it was not allowed.
    pub(crate) fn accept(&mut self, output: &[u32], ends: bool) -> Result<Verdict, String> {
        match &mut self.limit {
            Some(limit) => limit.accept(output, ends),
            None => Ok(Verdict::Continue),
        }
    }

    /// Writes the mask of the token after `output`, one bit an id.
    pub(crate) fn write_mask(&self, output: &[u32], row: &[Cell<i32>]) {
        let Some(limit) = &self.limit else {
            return;
        };
        let banning = (output.len() as u32) < self.min_tokens;
        let ends = self.entries.iter().filter(|entry| banning && entry.ends);
        let ends = ends.map(|entry| entry.token);
        limit.write(row, ends.chain(self.bad_words.banned(output)));
    }

    /// Upper bound of the edits of the next token, given how many were generated.
    pub fn num_edits(&self, num_output: u32) -> usize {
        self.num_entries(num_output) + self.bad_words.len()
    }

    fn num_entries(&self, num_output: u32) -> usize {
        if self.lasting || num_output < self.min_tokens {
            self.entries.len()
        } else {
            0
        }
    }

    /// Whether the edits of a token depend on which tokens came before it, and not only on how many.
    pub fn follow_tokens(&self) -> bool {
        self.counts || self.limit.is_some() || !self.bad_words.is_empty()
    }

    /// The edits of the token after `output` and `pending` more, at most [`Self::num_edits`] of them. None are
    /// pending where the edits [follow](Self::follow_tokens) the tokens.
    pub fn iter(&self, output: &[u32], pending: u32) -> impl Iterator<Item = LogitEdit> + '_ {
        let num_output = output.len() as u32 + pending;
        let masked = self.is_masked();
        let banning = num_output < self.min_tokens && !masked;
        let mut banned: Vec<u32> = if masked {
            Vec::new()
        } else {
            self.bad_words.banned(output).collect()
        };
        banned.sort_unstable();
        banned.dedup();
        let entries = &self.entries[..self.num_entries(num_output)];
        let others: Vec<u32> = banned
            .iter()
            .copied()
            .filter(|id| entries.is_empty() || !self.index.contains_key(id))
            .collect();
        let known = entries.iter().map(move |entry| {
            self.edit(
                entry,
                (banning && entry.ends) || banned.binary_search(&entry.token).is_ok(),
            )
        });
        known.chain(others.into_iter().map(|token| LogitEdit {
            token,
            repetition: 1.0,
            bias: f32::NEG_INFINITY,
        }))
    }

    fn edit(&self, entry: &Entry, banned: bool) -> LogitEdit {
        let seen = entry.count > 0;
        let presence = if seen { self.presence } else { 0.0 };
        let bias = if banned {
            f32::NEG_INFINITY
        } else {
            entry.bias - presence - self.frequency * entry.count as f32
        };
        let repetition = if seen || entry.in_prompt {
            self.repetition
        } else {
            1.0
        };
        LogitEdit {
            token: entry.token,
            repetition,
            bias,
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the sums are exact")]
mod tests {
    use super::*;

    fn find(edits: &LogitEdits, num_output: usize, token: u32) -> Option<LogitEdit> {
        edits
            .iter(&vec![1; num_output], 0)
            .find(|edit| edit.token == token)
    }

    fn new(prompt: &[u32], params: &SamplingSpec, eos: &[u32]) -> Option<Box<LogitEdits>> {
        LogitEdits::new(prompt, params, &TokenLimits::default(), eos)
    }

    #[test]
    fn repetition_sees_the_prompt_and_the_others_only_the_output() {
        let params = SamplingSpec {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            ..SamplingSpec::default()
        };
        let mut edits = new(&[7, 7, 8], &params, &[]).expect("penalties");
        let prompt_token = find(&edits, 0, 7).expect("in the prompt");
        assert_eq!((prompt_token.repetition, prompt_token.bias), (2.0, 0.0));
        edits.count(7);
        edits.count(7);
        edits.count(9);
        assert_eq!(find(&edits, 3, 7).expect("counted").bias, -1.0);
        assert_eq!(find(&edits, 3, 9).expect("counted").bias, -0.75);
        assert_eq!(find(&edits, 3, 8).expect("in the prompt").bias, 0.0);
        assert_eq!(edits.iter(&[1; 3], 0).count(), 3);
    }

    #[test]
    fn min_tokens_bans_every_ending_token_whatever_its_bias_and_then_lets_go() {
        let params = SamplingSpec {
            min_tokens: 4,
            stop_token_ids: vec![5],
            logit_bias: vec![(2, 100.0)],
            ..SamplingSpec::default()
        };
        let edits = new(&[1], &params, &[2, 3]).expect("min_tokens");
        for token in [2, 3, 5] {
            assert_eq!(
                find(&edits, 3, token).expect("banned").bias,
                f32::NEG_INFINITY
            );
        }
        assert_eq!(find(&edits, 4, 2).expect("biased").bias, 100.0);
        let bare = SamplingSpec {
            logit_bias: vec![],
            ..params
        };
        let edits = new(&[1], &bare, &[2]).expect("min_tokens");
        assert!(edits.num_edits(3) == 2 && edits.num_edits(4) == 0);
    }

    #[test]
    fn nothing_asked_is_nothing_kept() {
        assert!(new(&[1, 2], &SamplingSpec::default(), &[2]).is_none());
    }

    #[test]
    fn a_bad_word_is_one_edit_whatever_else_concerns_its_token() {
        let params = SamplingSpec {
            logit_bias: vec![(7, 5.0)],
            ..SamplingSpec::default()
        };
        let limits = TokenLimits {
            bad_words: BadWords::new([vec![7], vec![1, 7], vec![1, 8], vec![2, 9]]),
            ..TokenLimits::default()
        };
        let edits = LogitEdits::new(&[2], &params, &limits, &[]).expect("bad words");
        let listed: Vec<_> = edits
            .iter(&[1], 0)
            .map(|edit| (edit.token, edit.bias))
            .collect();
        let banned = f32::NEG_INFINITY;
        assert_eq!(listed, [(7, banned), (8, banned)]);
        assert!(listed.len() <= edits.num_edits(1));
        let bare = SamplingSpec::default();
        let edits = LogitEdits::new(&[2], &bare, &limits, &[]).expect("bad words");
        let listed: Vec<_> = edits.iter(&[3], 0).map(|edit| edit.token).collect();
        assert_eq!(listed, [7]);
    }

    #[test]
    fn under_a_mask_bans_are_bits_and_biases_stay_edits() {
        let params = SamplingSpec {
            logit_bias: vec![(7, 5.0)],
            min_tokens: 2,
            ..SamplingSpec::default()
        };
        let limits = TokenLimits {
            allowed_token_ids: Some(vec![3, 7, 33]),
            bad_words: BadWords::new([vec![1, 7]]),
            ..TokenLimits::default()
        };
        let edits = LogitEdits::new(&[9], &params, &limits, &[33]).expect("a limit");
        assert!(edits.is_masked());
        let finite = edits.iter(&[1], 0).all(|edit| edit.bias.is_finite());
        assert!(finite);
        let mask = |output: &[u32]| {
            let row = [const { Cell::new(-1) }; 3];
            edits.write_mask(output, &row);
            row.map(Cell::into_inner)
        };
        assert_eq!(mask(&[]), [1 << 3 | 1 << 7, 0, 0]);
        assert_eq!(mask(&[1]), [1 << 3, 0, 0]);
        assert_eq!(mask(&[5, 1]), [1 << 3, 2, 0]);
        assert_eq!(mask(&[5, 5]), [1 << 3 | 1 << 7, 2, 0]);
    }

    #[test]
    fn a_mask_that_bans_would_empty_stays_as_it_was() {
        let params = SamplingSpec {
            min_tokens: 2,
            ..SamplingSpec::default()
        };
        let limits = TokenLimits {
            allowed_token_ids: Some(vec![2]),
            ..TokenLimits::default()
        };
        let edits = LogitEdits::new(&[9], &params, &limits, &[2]).expect("a limit");
        let row = [const { Cell::new(0) }; 1];
        edits.write_mask(&[], &row);
        assert_eq!(row[0].get(), 4);
    }
}
