//! An engine's sizes and limits as a dict, as they travel from one process to another.

use miniinfer_core::{EngineConfig, NgramLookup};
use pyo3::prelude::*;

/// Values by the names of `Engine`'s keyword arguments, and the size of the vocabulary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Limits {
    pub vocab_size: u32,
    block_size: u32,
    num_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    max_model_len: u32,
    #[pyo3(default = true)]
    enable_prefix_caching: bool,
    #[pyo3(default)]
    target_itl_ms: Option<f64>,
    #[pyo3(default)]
    max_draft_tokens: u32,
    #[pyo3(default)]
    ngram_lookup: Option<Lookup>,
    #[pyo3(default = 20)]
    max_logprobs: u32,
}

/// How drafts are looked up, by the names of the core's fields.
#[derive(Clone, Copy, FromPyObject)]
#[pyo3(from_item_all)]
pub struct Lookup {
    min: u32,
    max: u32,
    rows_per_step: f32,
}

impl Lookup {
    /// The core's form of it.
    pub fn config(self) -> NgramLookup {
        let Self {
            min,
            max,
            rows_per_step,
        } = self;
        NgramLookup {
            min,
            max,
            rows_per_step,
        }
    }
}

impl Limits {
    /// The core's form of them.
    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            block_size: self.block_size,
            num_blocks: self.num_blocks,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len,
            max_draft_tokens: self.max_draft_tokens,
            ngram_lookup: self.ngram_lookup.map(Lookup::config),
            max_logprobs: self.max_logprobs,
            enable_prefix_caching: self.enable_prefix_caching,
            target_itl_ms: self.target_itl_ms,
            ..EngineConfig::default()
        }
    }
}
