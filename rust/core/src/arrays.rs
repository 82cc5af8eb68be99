//! The arrays of a step: what `plan` writes for the forward pass and what `commit` reads back.
//!
//! The caller owns them and lends them for each call as slices of cells, so their addresses never
//! change and nothing here needs `unsafe`. T, B, N, S, M, K below are the tokens, sequences and samples
//! of a step, `max_num_seqs`, the width of a block table row, and `max_logprobs`.
//!
//! A request is one sequence of a step. With drafts it is one for each of its rows: each is a decode of its own, whose
//! context ends with it, so that a draft is verified by the same sums as the token it stands for.

use std::cell::Cell;

use crate::config::EngineConfig;
use crate::error::StepError;

/// Fields of `header`.
pub mod header {
    /// Tokens in the step.
    pub const NUM_TOKENS: usize = 0;
    /// Sequences in the step: a request with drafts is one for each of its tokens.
    pub const NUM_SEQS: usize = 1;
    /// The first so many sequences have exactly one token.
    pub const NUM_DECODES: usize = 2;
    /// Rows of logits needed.
    pub const NUM_SAMPLES: usize = 3;
    /// Most tokens of one sequence in the step.
    pub const MAX_QUERY_LEN: usize = 4;
    /// Longest context in the step.
    pub const MAX_SEQ_LEN: usize = 5;
    /// Sum of the [`flag`]s.
    pub const FLAGS: usize = 6;
    /// Most logprobs any sampling request wants, -1 if none does.
    pub const NUM_LOGPROBS: usize = 7;
    /// Room that `logit_edits` needs.
    pub const NUM_EDITS: usize = 8;
    /// Rows that `prompt_rows` names.
    pub const NUM_PROMPT_ROWS: usize = 9;
    /// Most logprobs any of them wants.
    pub const NUM_PROMPT_LOGPROBS: usize = 10;
    /// Rows of logits that have a mask: what `fill_masks` writes.
    pub const NUM_MASKS: usize = 11;
    /// The first so many tokens are not known yet: what `source` names.
    pub const NUM_PENDING: usize = 12;
    /// Items of `header`.
    pub const LEN: usize = 16;
}

/// Bits of the header's flags: what some sampling request of the step asks for.
pub mod flag {
    /// A temperature above 0; without it the sampling arrays are not written.
    pub const RANDOM: i32 = 1;
    /// `top_k`.
    pub const TOP_K: i32 = 2;
    /// `top_p` below 1.
    pub const TOP_P: i32 = 4;
    /// `min_p` above 0.
    pub const MIN_P: i32 = 8;
}

macro_rules! step_arrays {
    ($($(#[$doc:meta])* $name:ident: $type:ty, |$c:ident| $len:expr;)*) => {
        /// One slot's arrays.
        #[derive(Clone, Copy)]
        pub struct StepArrays<'a> {
            $($(#[$doc])* pub $name: &'a [Cell<$type>],)*
        }

        impl<'a> StepArrays<'a> {
            /// Checks each array against the size that the configuration needs.
            pub fn check(&self, config: &EngineConfig) -> Result<(), StepError> {
                $({
                    let (needed, actual) = ({ let $c = config; $len }, self.$name.len());
                    if actual < needed {
                        let name = stringify!($name);
                        return Err(StepError::ArrayLength { name, needed, actual });
                    }
                })*
                Ok(())
            }
        }

        /// Name and needed number of items of each array.
        pub fn array_lengths(config: &EngineConfig) -> Vec<(&'static str, usize)> {
            vec![$((stringify!($name), { let $c = config; $len })),*]
        }

        /// Arrays that own their memory, for driving an engine without Python.
        pub struct OwnedArrays { $($name: Vec<$type>,)* }

        impl OwnedArrays {
            /// Zeroed arrays of the sizes that the configuration needs.
            pub fn new(config: &EngineConfig) -> Self {
                Self { $($name: vec![<$type>::default(); { let $c = config; $len }],)* }
            }

            /// The arrays as an engine takes them.
            pub fn view(&mut self) -> StepArrays<'_> {
                StepArrays { $($name: Cell::from_mut(&mut self.$name[..]).as_slice_of_cells(),)* }
            }
        }
    };
}

fn seqs(config: &EngineConfig) -> usize {
    config.max_num_seqs as usize
}

fn samples(config: &EngineConfig) -> usize {
    config.max_num_samples() as usize
}

fn tokens(config: &EngineConfig) -> usize {
    config.max_num_batched_tokens as usize
}

step_arrays! {
    /// Scalars of the step, see [`header`].
    header: i32, |_c| header::LEN;
    /// \[T\] token ids, packed: sequences with one token first. Those of pending tokens are 0.
    token_ids: i32, |c| tokens(c);
    /// \[T\] position of each token in its sequence.
    positions: i32, |c| tokens(c);
    /// \[T\] where the token's KV goes: block id times block size plus offset.
    slot_mapping: i64, |c| tokens(c);
    /// \[B + 1\] prefix sums of the sequences' token counts.
    query_start: i32, |c| samples(c) + 1;
    /// \[B\] context length, this step's tokens included.
    seq_lens: i32, |c| samples(c);
    /// \[B\] row of each one's request in `block_table`.
    rows: i32, |c| samples(c);
    /// \[S, M\] block ids by row; entries past a sequence hold anything.
    block_table: i32, |c| seqs(c) * c.max_blocks_per_seq() as usize;
    /// \[N\] index into the T tokens of each row of logits needed.
    logits_index: i32, |c| samples(c);
    /// \[N\] 0 is greedy.
    temperature: f32, |c| samples(c);
    /// \[N\] 0 is off.
    top_k: i32, |c| samples(c);
    /// \[N\] 1 is off.
    top_p: f32, |c| samples(c);
    /// \[N\] 0 is off.
    min_p: f32, |c| samples(c);
    /// \[N\] the request's draw for this position, in [0, 1).
    uniform: f32, |c| samples(c);
    /// \[B\] of each pending token, which sample of the step before it is.
    source: i32, |c| seqs(c);
    /// \[N\] out: the token sampled, -1 where the logits were not finite.
    sampled: i32, |c| samples(c);
    /// \[N\] out: its logprob.
    logprob: f32, |c| samples(c);
    /// \[N\] out: its rank, 1 is the likeliest.
    rank: i32, |c| samples(c);
    /// \[N, K\] out: the likeliest tokens.
    top_ids: i32, |c| samples(c) * c.max_logprobs as usize;
    /// \[N, K\] out: their logprobs.
    top_logprobs: f32, |c| samples(c) * c.max_logprobs as usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_array_is_named_with_both_lengths() {
        let config = EngineConfig::default();
        let mut arrays = OwnedArrays::new(&config);
        arrays
            .view()
            .check(&config)
            .expect("sized by the same list");
        arrays.rows.truncate(3);
        let error = arrays.view().check(&config).expect_err("3 < 256");
        assert_eq!(
            error,
            StepError::ArrayLength {
                name: "rows",
                needed: 256,
                actual: 3
            }
        );
    }
}
