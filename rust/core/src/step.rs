//! What a step hands on: the tokens that were sampled and the requests that ended.

use std::sync::Arc;

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
    }
}
