//! What can go wrong, each with the thing, the limit and the value.

use thiserror::Error;

use crate::grammar::GrammarError;
use crate::ngram::MAX_NGRAM;

/// A configuration that cannot work.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ConfigError {
    /// A size of zero.
    #[error("{name} must be at least 1, got 0")]
    Zero {
        /// The setting.
        name: &'static str,
    },
    /// A size beyond what the step arrays can index.
    #[error("{name} must be at most 2147483647, got {value}")]
    TooLarge {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: u64,
    },
    /// Each running request needs a token of the budget in each step.
    #[error(
        "max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})"
    )]
    #[allow(missing_docs)]
    BudgetBelowSeqs {
        max_num_batched_tokens: u32,
        max_num_seqs: u32,
    },
    /// One sequence of the longest length must fit.
    #[error(
        "max_model_len is {max_model_len} tokens but the KV cache holds {capacity} ({num_blocks} blocks of {block_size}); lower max_model_len or raise num_kv_blocks"
    )]
    #[allow(missing_docs)]
    PoolTooSmall {
        max_model_len: u32,
        num_blocks: u32,
        block_size: u32,
        capacity: u64,
    },
    /// N-grams that cannot be looked up.
    #[error("n-grams that are looked up must have 1 to {MAX_NGRAM} tokens, got {min} to {max}")]
    NgramLengths {
        /// Fewest tokens.
        min: u32,
        /// Most tokens.
        max: u32,
    },
    /// A price of rows that is no number of rows.
    #[error("rows_per_step must be a finite number of at least 0, got {value}")]
    RowsPerStep {
        /// The value given.
        value: f32,
    },
    /// A target time that is not a positive number.
    #[error("target_itl_ms must be a positive number, got {value}")]
    Target {
        /// The value given.
        value: f64,
    },
}

/// Why a request was refused before it entered the queue.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum SubmitError {
    /// Nothing to continue from.
    #[error("the prompt is empty: it must hold at least 1 token")]
    EmptyPrompt,
    /// Prompt and output together exceed the context.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}: together {total}, beyond the context of {max_model_len} tokens"
    )]
    TooLong {
        prompt: usize,
        max_tokens: u32,
        total: u64,
        max_model_len: u32,
    },
    /// The prompt alone fills the context.
    #[error(
        "the prompt has {prompt} tokens: the context of {max_model_len} tokens leaves no room for output"
    )]
    PromptTooLong { prompt: usize, max_model_len: u32 },
    /// A token of the prompt that the model does not know.
    #[error("prompt token ids must be below the vocabulary size of {vocab_size}, got {token}")]
    Vocabulary { token: u32, vocab_size: u32 },
    /// A parameter outside its range.
    #[error("{name} must be {limit}, got {value}")]
    Parameter {
        name: &'static str,
        limit: String,
        value: String,
    },
    /// A grammar that cannot be used.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The engine is gone.
    #[error("the engine has stopped: {reason}")]
    EngineStopped { reason: String },
}

/// Misuse of the step protocol or a broken array.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum StepError {
    /// `plan` on a slot whose step has not been committed, or `commit` without a plan.
    #[error("slot {slot} is {actual}; {call} needs it to be {needed}")]
    SlotState {
        slot: usize,
        call: &'static str,
        actual: &'static str,
        needed: &'static str,
    },
    /// Steps end in the order in which they were planned.
    #[error("slot {slot} was planned after slot {first}: {call} needs that one to end first")]
    OutOfOrder {
        slot: usize,
        call: &'static str,
        first: usize,
    },
    /// There are two slots.
    #[error("slot must be 0 or 1, got {slot}")]
    NoSuchSlot { slot: usize },
    /// An array shorter than the configuration needs.
    #[error("array {name} must hold {needed} items, got {actual}")]
    ArrayLength {
        name: &'static str,
        needed: usize,
        actual: usize,
    },
}

/// An engine that could not be set up.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum RuntimeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot set up the engine's threads and descriptors: {0}")]
    System(#[from] std::io::Error),
}
