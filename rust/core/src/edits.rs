//! Sparse changes to a request's logits: penalties, biases and bans.
//!
//! Kept per request as a table of the tokens concerned, so that a step exports what it must change and
//! no `[requests, vocabulary]` array of counts exists anywhere. The table follows the tokens, not the
//! blocks: preemption cannot disturb it.

use rustc_hash::FxHashMap;

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
#[derive(Clone)]
pub struct LogitEdits {
    entries: Vec<Entry>,
    index: FxHashMap<u32, u32>,
    presence: f32,
    frequency: f32,
    repetition: f32,
    min_tokens: u32,
    /// Whether anything remains once `min_tokens` is reached.
    lasting: bool,
    counts: bool,
}

impl LogitEdits {
    /// The table of a request, or `None` if its logits are never changed.
    pub fn new(prompt: &[u32], params: &SamplingSpec, eos: &[u32]) -> Option<Box<Self>> {
        let repeats = params.repetition_penalty.to_bits() != 1f32.to_bits();
        let counts = params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 || repeats;
        let lasting = counts || !params.logit_bias.is_empty();
        if !lasting && params.min_tokens == 0 {
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
            for &token in own.chain(eos.iter().filter(|_| !params.ignore_eos)) {
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

    /// Upper bound of the edits of the next token, given how many were generated.
    pub fn num_edits(&self, num_output: u32) -> usize {
        if self.lasting || num_output < self.min_tokens {
            self.entries.len()
        } else {
            0
        }
    }

    #[cfg(test)]
    fn is_empty(&self, num_output: u32) -> bool {
        self.num_edits(num_output) == 0
    }

    /// The edits of the next token, at most [`Self::num_edits`] of them.
    pub fn iter(&self, num_output: u32) -> impl Iterator<Item = LogitEdit> + '_ {
        let banning = num_output < self.min_tokens;
        let take = self.num_edits(num_output);
        self.entries[..take].iter().map(move |entry| {
            let seen = entry.count > 0;
            let presence = if seen { self.presence } else { 0.0 };
            let bias = if banning && entry.ends {
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
        })
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the sums are exact")]
mod tests {
    use super::*;

    fn find(edits: &LogitEdits, num_output: u32, token: u32) -> Option<LogitEdit> {
        edits.iter(num_output).find(|edit| edit.token == token)
    }

    #[test]
    fn repetition_sees_the_prompt_and_the_others_only_the_output() {
        let params = SamplingSpec {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            ..SamplingSpec::default()
        };
        let mut edits = LogitEdits::new(&[7, 7, 8], &params, &[]).expect("penalties");
        let prompt_token = find(&edits, 0, 7).expect("in the prompt");
        assert_eq!((prompt_token.repetition, prompt_token.bias), (2.0, 0.0));
        edits.count(7);
        edits.count(7);
        edits.count(9);
        assert_eq!(find(&edits, 3, 7).expect("counted").bias, -1.0);
        assert_eq!(find(&edits, 3, 9).expect("counted").bias, -0.75);
        assert_eq!(find(&edits, 3, 8).expect("in the prompt").bias, 0.0);
        assert_eq!(edits.iter(3).count(), 3);
    }

    #[test]
    fn min_tokens_bans_every_ending_token_whatever_its_bias_and_then_lets_go() {
        let params = SamplingSpec {
            min_tokens: 4,
            stop_token_ids: vec![5],
            logit_bias: vec![(2, 100.0)],
            ..SamplingSpec::default()
        };
        let edits = LogitEdits::new(&[1], &params, &[2, 3]).expect("min_tokens");
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
        let edits = LogitEdits::new(&[1], &bare, &[2]).expect("min_tokens");
        assert!(!edits.is_empty(3) && edits.is_empty(4));
    }

    #[test]
    fn nothing_asked_is_nothing_kept() {
        assert!(LogitEdits::new(&[1, 2], &SamplingSpec::default(), &[2]).is_none());
    }
}
