//! A request: what was asked, and how far it has come.

use std::mem::offset_of;
use std::sync::Arc;
use std::time::Instant;

use crate::block::{BlockId, ChainKey, ExtraKey};
use crate::draft::Drafter;
use crate::edits::LogitEdits;
use crate::error::SubmitError;
use crate::grammar::TokenLimits;
use crate::prompt_logprobs::PromptLogprobs;

/// Names a request for the whole life of the process; never reused, so a late message cannot hit a
/// successor.
pub type RequestId = u64;

/// Most choices of one request: each has a stream of its own from the moment it is submitted.
pub const MAX_CHOICES: u32 = 16384;

/// How to draw tokens and when to stop.
///
/// What each step looks at comes first and fills one cache line, see [`Request`].
#[derive(Clone, Debug)]
#[repr(C)]
pub struct SamplingSpec {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// Key of the request's noise.
    pub seed: u64,
    /// Alternatives to report per token; `None` reports nothing.
    pub num_logprobs: Option<u32>,
    /// No end-of-sequence or stop token before this many were generated.
    pub min_tokens: u32,
    /// The end-of-sequence ids do not end this request.
    pub ignore_eos: bool,
    /// Ids that end the request, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Subtracted from the logit of each token that was generated.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it was generated.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens of the prompt or the output.
    pub repetition_penalty: f32,
    /// Tokens to generate at most; `None` is the rest of the context.
    pub max_tokens: Option<u32>,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            num_logprobs: None,
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            logit_bias: Vec::new(),
        }
    }
}

/// A request on its way to the engine.
#[derive(Clone, Debug, Default)]
pub struct NewRequest {
    /// Prompt token ids.
    pub prompt: Vec<u32>,
    /// How to draw and when to stop.
    pub sampling: SamplingSpec,
    /// What it may not, or may only, generate.
    pub limits: TokenLimits,
    /// How many choices to generate from the prompt.
    pub n: u32,
    /// Lower runs first.
    pub priority: i32,
    /// Whose request it is: tenants share the prefill budget evenly.
    pub tenant: Arc<str>,
    /// What else than tokens a cached block must agree in.
    pub extra_keys: Vec<ExtraKey>,
    /// Alternatives to report per token of the prompt; `None` reports nothing.
    pub num_prompt_logprobs: Option<u32>,
}

impl Default for Arrival {
    fn default() -> Self {
        Self {
            time: Instant::now(),
        }
    }
}

/// When a request came.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Time of submission.
    pub time: Instant,
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// In a waiting queue, without a row.
    Waiting,
    /// A choice that waits for the first choice of its request to compute the prompt.
    Following,
    /// Holds a row and blocks; its tokens are being computed.
    Prefill,
    /// Holds a row and blocks; one token a step.
    Decode,
    /// Like `Decode`, but its reader is behind: not scheduled.
    Paused,
    /// Preempted while paused: holds nothing and is in no queue until it is resumed.
    Parked,
    /// Ended while a step in flight has it: holds its row and blocks until that step's commit.
    Gone,
}

/// The leader of a request that has none. No request has this id. (An `Option` would offer its spare values to
/// mark a free place of the request table, and each look at a request would begin in this far corner of it.)
pub(crate) const NO_LEADER: RequestId = RequestId::MAX;

/// The row of a request that has none.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// A live request. `tokens` is prompt and output; the KV of the first `computed` of them is in the
/// blocks of `table`.
///
/// A decode step touches the first three cache lines, as far as `params.stop_token_ids`, and no other memory of
/// the request but the end of `tokens`: thousands of requests do not fit the nearest caches, and a step waits
/// for memory more than for anything else. What is not needed each step lies behind.
#[repr(C, align(64))]
pub(crate) struct Request {
    pub tokens: Vec<u32>,
    pub table: Vec<BlockId>,
    pub computed: u32,
    /// Tokens of `tokens` (and drafts) given to the step in flight.
    pub scheduled: u32,
    /// Longest the sequence may become.
    pub max_len: u32,
    pub row: u32,
    pub prompt_len: u32,
    /// Blocks of `table` that are full and were offered to the prefix index.
    pub registered: u32,
    /// Per slot: the entries of the block table row that are already written.
    pub synced: [u32; 2],
    /// While decoding: the last of `tokens`, and the block of its position.
    pub last_id: u32,
    pub last_block: BlockId,
    pub edits: Option<Box<LogitEdits>>,
    pub id: RequestId,
    pub last_token: Option<Instant>,
    /// Prompt tokens taken from the prefix cache at the first admission; 0 before it.
    pub cached_tokens: u32,
    pub state: State,
    pub paused: bool,
    pub params: SamplingSpec,
    pub chain: ChainKey,
    pub root: ChainKey,
    pub drafts: Box<[u32]>,
    pub drafter: Option<Box<Drafter>>,
    pub extra_keys: Arc<[ExtraKey]>,
    pub priority: i32,
    pub tenant: u32,
    /// Order of arrival.
    pub sequence: u64,
    /// Prefill tokens that its tenant had been given when it arrived.
    pub clock: u64,
    /// Its place in the queue it is in.
    pub key: i64,
    /// Steps in which it was passed over because its blocks did not fit.
    pub skipped_steps: u32,
    /// Free blocks it needed for itself when last looked at.
    pub blocks_needed: u32,
    pub last_skip_step: u64,
    /// Preemptions, those while its reader was behind not counted.
    pub preemptions: u32,
    /// Its position in the list of decoding requests.
    pub decode_at: u32,
    /// The choice that computes the prompt, for the others of its request; otherwise [`NO_LEADER`].
    pub leader: RequestId,
    /// The choices that wait for this one to compute the prompt.
    pub followers: Box<[RequestId]>,
    pub arrived: Instant,
    pub admitted: Option<Instant>,
    pub first_token: Option<Instant>,
    /// What is known of the prompt's log-probabilities, until they are handed on; `None` if they are not wanted.
    pub prompt_logprobs: Option<Box<PromptLogprobs>>,
}

const _: () = assert!(
    offset_of!(Request, params) + offset_of!(SamplingSpec, presence_penalty) <= 3 * 64,
    "what each step looks at fits three cache lines"
);

// An odd number of lines: with a power of two, the first lines of all requests would share an eighth of a cache.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
const _: () = assert!(
    size_of::<Option<Request>>() == 7 * 64,
    "a request fills seven cache lines"
);

impl Request {
    pub fn num_output(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_len
    }

    /// The tokens that were generated.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len as usize..]
    }

    /// Brings `last_block` and `last_id` up to date with `table` and `tokens`, where one of the table's blocks
    /// is the last token's: without drafts that is its last one.
    pub fn note_last(&mut self) {
        self.last_id = self.tokens.last().copied().unwrap_or_default();
        self.last_block = self.table.last().copied().unwrap_or_default();
    }

    /// Tokens whose KV is missing.
    pub fn remaining(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    /// Where it stands among its tenant's requests: the clock at its arrival and what it lacks of its prompt.
    /// What it generated does not move it back when it must be computed again.
    pub fn turn_key(&self) -> i64 {
        self.clock as i64 + i64::from(self.prompt_len) - i64::from(self.computed)
    }

    /// Whether it may lose its row to a request of this priority: it is less urgent (a greater number), or
    /// its reader is behind.
    pub fn yields_to(&self, priority: i32) -> bool {
        self.priority > priority || self.state == State::Paused
    }

    /// Steals nothing from older requests: the order in which victims are chosen (greatest first).
    pub fn victim_rank(&self) -> (bool, i32, u64) {
        (self.paused, self.priority, self.sequence)
    }

    /// Whether the next sampled token may end the request by its id.
    pub fn is_stop_token(&self, token: u32, eos: &[u32]) -> Option<StopKind> {
        if self.num_output() <= self.params.min_tokens {
            return None;
        }
        if self.params.stop_token_ids.contains(&token) {
            return Some(StopKind::Token);
        }
        (!self.params.ignore_eos && eos.contains(&token)).then_some(StopKind::Eos)
    }
}

/// Which kind of token ended a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopKind {
    /// An end-of-sequence id of the model.
    Eos,
    /// One of the request's own `stop_token_ids`.
    Token,
}

impl NewRequest {
    /// Checks the request against the limits, before anything is queued.
    pub fn validate(&self, max_model_len: u32, max_logprobs: u32) -> Result<(), SubmitError> {
        let prompt = self.prompt.len();
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt >= max_model_len as usize {
            return Err(SubmitError::PromptTooLong {
                prompt,
                max_model_len,
            });
        }
        if let Some(max_tokens) = self.sampling.max_tokens {
            if max_tokens == 0 {
                return Err(parameter("max_tokens", "at least 1", max_tokens));
            }
            let total = prompt as u64 + u64::from(max_tokens);
            if total > u64::from(max_model_len) {
                return Err(SubmitError::TooLong {
                    prompt,
                    max_tokens,
                    total,
                    max_model_len,
                });
            }
        }
        if !(1..=MAX_CHOICES).contains(&self.n) {
            let limit = format!("from 1 to {MAX_CHOICES}");
            return Err(parameter("n", &limit, self.n));
        }
        let s = &self.sampling;
        for (name, wanted) in [
            ("logprobs", s.num_logprobs),
            ("prompt_logprobs", self.num_prompt_logprobs),
        ] {
            if let Some(value) = wanted.filter(|&k| k > max_logprobs) {
                return Err(parameter(name, &format!("at most {max_logprobs}"), value));
            }
        }
        let positive = |v: f32| v.is_finite() && v > 0.0;
        if !(s.temperature.is_finite() && s.temperature >= 0.0) {
            return Err(parameter(
                "temperature",
                "a finite number of at least 0",
                s.temperature,
            ));
        }
        if !(positive(s.top_p) && s.top_p <= 1.0) {
            return Err(parameter("top_p", "in (0, 1]", s.top_p));
        }
        if !(0.0..=1.0).contains(&s.min_p) {
            return Err(parameter("min_p", "in [0, 1]", s.min_p));
        }
        if !positive(s.repetition_penalty) {
            return Err(parameter(
                "repetition_penalty",
                "above 0",
                s.repetition_penalty,
            ));
        }
        for (name, value) in [
            ("presence_penalty", s.presence_penalty),
            ("frequency_penalty", s.frequency_penalty),
        ] {
            if !value.is_finite() {
                return Err(parameter(name, "finite", value));
            }
        }
        if self
            .limits
            .allowed_token_ids
            .as_ref()
            .is_some_and(Vec::is_empty)
        {
            return Err(parameter(
                "allowed_token_ids",
                "at least 1 token id",
                "none",
            ));
        }
        if self.limits.allowed_token_ids.is_some() && self.limits.grammar.is_some() {
            let limit = "left out where structured_outputs says what is allowed";
            return Err(parameter("allowed_token_ids", limit, "both"));
        }
        if let Some((token, bias)) = s.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(parameter(
                "logit_bias",
                "finite",
                format!("{bias} for token {token}"),
            ));
        }
        Ok(())
    }
}

fn parameter(name: &'static str, limit: &str, value: impl std::fmt::Display) -> SubmitError {
    SubmitError::Parameter {
        name,
        limit: limit.into(),
        value: value.to_string(),
    }
}
