//! Keyword arguments of `submit`, read in one place.

use std::sync::Arc;

use miniinfer_core::block::ExtraKey;
use miniinfer_core::error::SubmitError;
use miniinfer_core::grammar::{BadWords, TokenLimits};
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::text::StreamSpec;
use pyo3::prelude::*;

use crate::grammar::CompiledGrammar;
use crate::parsing::{TypeNames, parse_spec};

/// What `submit` takes beside the prompt, as a dict of these names. All but `temperature` have defaults.
#[derive(FromPyObject)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the names of keyword arguments"
)]
#[pyo3(from_item_all)]
pub struct SubmitParams {
    #[pyo3(default = 1)]
    n: u32,
    temperature: f32,
    #[pyo3(default)]
    top_k: u32,
    #[pyo3(default = 1.0)]
    top_p: f32,
    #[pyo3(default)]
    min_p: f32,
    #[pyo3(default)]
    presence_penalty: f32,
    #[pyo3(default)]
    frequency_penalty: f32,
    #[pyo3(default = 1.0)]
    repetition_penalty: f32,
    #[pyo3(default)]
    seed: u64,
    #[pyo3(default)]
    logprobs: Option<u32>,
    #[pyo3(default)]
    prompt_logprobs: Option<u32>,
    #[pyo3(default)]
    max_tokens: Option<u32>,
    #[pyo3(default)]
    min_tokens: u32,
    #[pyo3(default)]
    ignore_eos: bool,
    #[pyo3(default)]
    stop_token_ids: Vec<u32>,
    #[pyo3(default)]
    logit_bias: Vec<(u32, f32)>,
    #[pyo3(default)]
    stop: Vec<String>,
    #[pyo3(default)]
    include_stop: bool,
    #[pyo3(default = true)]
    skip_special_tokens: bool,
    #[pyo3(default)]
    final_only: bool,
    #[pyo3(default)]
    priority: i32,
    #[pyo3(default)]
    tenant: String,
    #[pyo3(default)]
    cache_salt: Option<String>,
    #[pyo3(default)]
    grammar: Option<Py<CompiledGrammar>>,
    #[pyo3(default)]
    grammar_after: Vec<u32>,
    #[pyo3(default)]
    allowed_token_ids: Option<Vec<u32>>,
    #[pyo3(default)]
    bad_words: Vec<Vec<u32>>,
    #[pyo3(default)]
    reasoning_parser: Option<String>,
    #[pyo3(default)]
    tool_parser: Option<String>,
    #[pyo3(default)]
    in_reasoning: Option<bool>,
    #[pyo3(default)]
    calls_only: bool,
    #[pyo3(default)]
    tool_types: TypeNames,
}

impl SubmitParams {
    /// The request and the text side's part of it. Fails on the name of an unknown parser or type.
    pub fn into_request(self, prompt: Vec<u32>) -> Result<(NewRequest, StreamSpec), SubmitError> {
        let parse = parse_spec(
            self.reasoning_parser.as_deref(),
            self.tool_parser.as_deref(),
            self.in_reasoning,
            self.calls_only,
            self.tool_types,
        )?;
        let sampling = SamplingSpec {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            num_logprobs: self.logprobs,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids,
            logit_bias: self.logit_bias,
        };
        let limits = TokenLimits {
            grammar: self.grammar.map(|grammar| grammar.get().0.clone()),
            grammar_after: self.grammar_after,
            allowed_token_ids: self.allowed_token_ids,
            bad_words: BadWords::new(self.bad_words),
        };
        let request = NewRequest {
            prompt,
            sampling,
            limits,
            n: self.n,
            num_prompt_logprobs: self.prompt_logprobs,
            priority: self.priority,
            tenant: Arc::from(self.tenant),
            extra_keys: self.cache_salt.into_iter().map(ExtraKey::Salt).collect(),
        };
        let spec = StreamSpec {
            skip_special_tokens: self.skip_special_tokens,
            continuation: true,
            stop: self.stop,
            include_stop: self.include_stop,
            final_only: self.final_only,
            parse,
            ..StreamSpec::default()
        };
        Ok((request, spec))
    }
}
