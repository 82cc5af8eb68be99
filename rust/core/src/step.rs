//! What a step hands on: the tokens that were sampled and the requests that ended.

use std::sync::{Arc, Mutex};

use crate::prompt_logprobs::PromptLogprobs;
use crate::request::RequestId;

/// Why the engine ended a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// An end-of-sequence id of the model.
    Eos(u32),
    /// One of the request's `stop_token_ids`.
    StopToken(u32),
    /// `max_tokens` or the context.
    Length,
    /// Cancelled.
    Abort,
    /// The step it was in failed, or the engine did.
    Error(Arc<str>),
}

/// One request's share of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputEntry {
    /// The request.
    pub id: RequestId,
    /// How many of the step's tokens are its own, in order of the entries.
    pub num_tokens: u32,
    /// Alternatives it wants per token; `None` wants no logprobs.
    pub num_logprobs: Option<u32>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// Set when this is the request's last entry.
    pub end: Option<EndReason>,
}

impl OutputEntry {
    /// An entry to be filled in where it lies: one built elsewhere and copied costs a stalled load for each
    /// request and step (15% of a step with 1,024 requests).
    pub(crate) const BLANK: Self = Self {
        id: 0,
        num_tokens: 0,
        num_logprobs: None,
        cached_tokens: 0,
        end: None,
    };
}

/// Everything a step hands on, flat.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One entry per request that got tokens or ended.
    pub entries: Vec<OutputEntry>,
    /// Sampled tokens, grouped by entry.
    pub tokens: Vec<u32>,
    /// Logprob of each token; empty if nobody wants logprobs.
    pub logprobs: Vec<f32>,
    /// Rank of each token.
    pub ranks: Vec<u32>,
    /// `top_width` alternatives for each token.
    pub top_ids: Vec<u32>,
    /// Their logprobs.
    pub top_logprobs: Vec<f32>,
    /// Alternatives stored per token.
    pub top_width: usize,
    /// Prompts whose log-probabilities are complete: they go before the tokens.
    pub prompt_logprobs: Vec<PromptLogprobs>,
}

impl StepOutput {
    /// Whether there is nothing to hand on.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Empties it, keeping the memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.ranks.clear();
        self.top_ids.clear();
        self.top_logprobs.clear();
        self.top_width = 0;
        self.prompt_logprobs.clear();
    }
}

/// Most outputs that wait to be filled again: one is filled while the text side reads another.
const MOST_SPARES: usize = 4;

/// Outputs that were read, on their way back to be filled again: a step allocates nothing.
#[derive(Clone, Default)]
pub struct SpareOutputs(Arc<Mutex<Vec<StepOutput>>>);

impl SpareOutputs {
    /// An empty output: a spare one, or a new one if there is none or its owner is busy giving it back.
    pub fn take(&self) -> StepOutput {
        let spares = self.0.try_lock();
        spares
            .ok()
            .and_then(|mut spares| spares.pop())
            .unwrap_or_default()
    }

    /// Gives back an output that was read.
    pub fn give(&self, mut output: StepOutput) {
        output.clear();
        if let Ok(mut spares) = self.0.try_lock()
            && spares.len() < MOST_SPARES
        {
            spares.push(output);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_output_comes_back_empty_with_its_memory_and_few_are_kept() {
        let spares = SpareOutputs::default();
        assert_eq!(spares.take().tokens.capacity(), 0);
        for _ in 0..2 * MOST_SPARES {
            spares.give(StepOutput {
                tokens: vec![7; 100],
                top_width: 3,
                ..StepOutput::default()
            });
        }
        let taken: Vec<_> = (0..=MOST_SPARES).map(|_| spares.take()).collect();
        assert!(taken.iter().all(|output| *output == StepOutput::default()));
        let kept = taken
            .iter()
            .filter(|output| output.tokens.capacity() >= 100);
        assert_eq!(kept.count(), MOST_SPARES);
    }
}
