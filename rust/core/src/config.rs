//! Sizes and limits of an engine, fixed for its life.

use crate::error::ConfigError;
use crate::ngram::MAX_NGRAM;

/// How drafts are looked up in a request's own tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NgramLookup {
    /// Fewest tokens that must have occurred before, 1 at least.
    pub min: u32,
    /// Most tokens that are looked for, [`MAX_NGRAM`] at most.
    pub max: u32,
    /// Rows that take as long to compute as a step without any would: the more, the less a wrong draft costs.
    pub rows_per_step: f32,
}

/// Sizes and limits of an engine. All counts are tokens unless the name says otherwise.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV blocks in the pool.
    pub num_blocks: u32,
    /// Requests that may hold a row (be prefilling or decoding) at once.
    pub max_num_seqs: u32,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Most draft tokens verified per request and step; 0 turns speculation off.
    pub max_draft_tokens: u32,
    /// Where drafts come from, besides those that are sent.
    pub ngram_lookup: Option<NgramLookup>,
    /// Most alternatives reported per token (`top_logprobs`).
    pub max_logprobs: u32,
    /// Reuse KV blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Shrink prefill chunks so that a step with decodes in it stays under this many milliseconds.
    pub target_itl_ms: Option<f64>,
    /// Candidates that may be passed over in one step because their blocks do not fit.
    pub max_skips: u32,
    /// Steps for which a request may be passed over; after them nothing is admitted behind it.
    pub max_skipped_steps: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 1024,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: 8192,
            max_draft_tokens: 0,
            ngram_lookup: None,
            max_logprobs: 20,
            enable_prefix_caching: true,
            target_itl_ms: None,
            max_skips: 16,
            max_skipped_steps: 64,
        }
    }
}

impl EngineConfig {
    /// Checks the limits against each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (name, value) in [
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
            if value > i32::MAX as u32 {
                let value = value.into();
                return Err(ConfigError::TooLarge { name, value });
            }
        }
        let samples = u64::from(self.max_num_seqs) * (1 + u64::from(self.max_draft_tokens));
        let alternatives = samples * u64::from(self.max_logprobs.max(1));
        for (name, value) in [
            ("max_num_seqs x (1 + max_draft_tokens)", samples),
            (
                "max_num_seqs x (1 + max_draft_tokens) x max_logprobs",
                alternatives,
            ),
        ] {
            if value > i32::MAX as u64 {
                return Err(ConfigError::TooLarge { name, value });
            }
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(ConfigError::BudgetBelowSeqs {
                max_num_batched_tokens: self.max_num_batched_tokens,
                max_num_seqs: self.max_num_seqs,
            });
        }
        let capacity = u64::from(self.num_blocks) * u64::from(self.block_size);
        if u64::from(self.max_model_len) > capacity {
            return Err(ConfigError::PoolTooSmall {
                max_model_len: self.max_model_len,
                num_blocks: self.num_blocks,
                block_size: self.block_size,
                capacity,
            });
        }
        if let Some(target) = self.target_itl_ms
            && !(target.is_finite() && target > 0.0)
        {
            return Err(ConfigError::Target { value: target });
        }
        self.ngram_lookup.map_or(Ok(()), |l| self.check_lookup(l))
    }

    fn check_lookup(&self, lookup: NgramLookup) -> Result<(), ConfigError> {
        let NgramLookup { min, max, .. } = lookup;
        if self.max_draft_tokens == 0 {
            let name = "max_draft_tokens";
            return Err(ConfigError::Zero { name });
        }
        if min == 0 || min > max || max > MAX_NGRAM {
            return Err(ConfigError::NgramLengths { min, max });
        }
        if !(lookup.rows_per_step.is_finite() && lookup.rows_per_step >= 0.0) {
            let value = lookup.rows_per_step;
            return Err(ConfigError::RowsPerStep { value });
        }
        Ok(())
    }

    /// Blocks that a sequence of `max_model_len` tokens needs: the width of a block table row.
    pub fn max_blocks_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// Rows of logits that one step may sample from.
    pub fn max_num_samples(&self) -> u32 {
        self.max_num_seqs * (1 + self.max_draft_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_below_one_sequence_is_refused_with_the_numbers() {
        let config = EngineConfig {
            num_blocks: 8,
            max_model_len: 129,
            ..EngineConfig::default()
        };
        let message = config.validate().expect_err("8 x 16 < 129").to_string();
        assert!(
            message.contains("129") && message.contains("128"),
            "{message}"
        );
        EngineConfig {
            max_model_len: 128,
            ..config
        }
        .validate()
        .expect("8 x 16 = 128");
    }

    #[test]
    fn lookups_that_cannot_work_are_refused_with_the_numbers() {
        let lookup = |min, max, rows_per_step| NgramLookup {
            min,
            max,
            rows_per_step,
        };
        for (max_draft_tokens, ngram_lookup, part) in [
            (0, lookup(2, 4, 8.0), "max_draft_tokens must be at least 1"),
            (4, lookup(0, 4, 8.0), "got 0 to 4"),
            (4, lookup(5, 4, 8.0), "got 5 to 4"),
            (4, lookup(2, 17, 8.0), "1 to 16 tokens, got 2 to 17"),
            (4, lookup(2, 4, f32::NAN), "at least 0, got NaN"),
            (4, lookup(2, 4, -1.0), "at least 0, got -1"),
        ] {
            let config = EngineConfig {
                max_draft_tokens,
                ngram_lookup: Some(ngram_lookup),
                ..EngineConfig::default()
            };
            let message = config.validate().expect_err("invalid").to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_budget_must_cover_one_token_of_each_running_request() {
        let config = EngineConfig {
            max_num_batched_tokens: 255,
            ..EngineConfig::default()
        };
        assert!(config.validate().is_err());
    }
}
