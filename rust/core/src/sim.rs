//! An engine without a model, for tests and for measuring the control plane alone.
//!
//! The stand-in for the model keeps a cache of its own in the places that the step arrays name: the
//! entry of a token is a digest of the whole sequence up to it, made from the entry before it, which is
//! found through the block table. A wrong block, a stale prefix or a skipped token changes every token
//! that follows, as it would in a real model.

use std::cell::Cell;

use crate::arrays::{OwnedArrays, StepArrays, header};
use crate::config::EngineConfig;
use crate::engine::{Command, Engine};
use crate::error::{ConfigError, StepError};
use crate::noise::bits;
use crate::prompt_logprobs::PromptRows;
use crate::request::{Arrival, NewRequest, RequestId};
use crate::step::StepOutput;

/// The digest of a sequence from that of all but its last token.
fn extend(digest: u64, token: u32) -> u64 {
    bits(digest, u64::from(token))
}

fn predict(digest: u64, vocab: u32) -> u32 {
    (bits(digest, u64::MAX) % u64::from(vocab)) as u32
}

/// The tokens that follow a prompt: what a request must get, however it is scheduled.
pub fn continuation(prompt: &[u32], vocab: u32) -> impl Iterator<Item = u32> {
    let mut digest = prompt
        .iter()
        .fold(0, |digest, &token| extend(digest, token));
    std::iter::repeat_with(move || {
        let token = predict(digest, vocab);
        digest = extend(digest, token);
        token
    })
}

/// The log-probability of a prompt token after the sequence of a digest.
fn judge(digest: u64, token: u32) -> f32 {
    -((bits(digest, u64::from(token)) % 1000) as f32) / 64.0
}

/// The log-probabilities of a prompt's tokens from the second on: what a request must be told, however it is
/// scheduled.
pub fn prompt_logprobs(prompt: &[u32]) -> Vec<f32> {
    let digests = prompt.iter().scan(0, |digest, &token| {
        *digest = extend(*digest, token);
        Some(*digest)
    });
    let judged = digests.zip(&prompt[1..]);
    judged.map(|(digest, &next)| judge(digest, next)).collect()
}

/// A made-up model over token ids below `vocab`, with its cache.
pub struct ShadowModel {
    cache: Vec<u64>,
    block_size: usize,
    max_blocks: usize,
    vocab: u32,
    /// Of each token of the last step.
    digests: Vec<u64>,
}

impl ShadowModel {
    /// A model for an engine of this configuration.
    pub fn new(config: &EngineConfig, vocab: u32) -> Self {
        Self {
            cache: vec![0; config.num_blocks as usize * config.block_size as usize],
            block_size: config.block_size as usize,
            max_blocks: config.max_blocks_per_seq() as usize,
            vocab,
            digests: Vec::new(),
        }
    }

    /// Runs a planned step: fills the cache and `sampled`. `before` is what the step before sampled, if tokens
    /// are pending.
    pub fn forward(&mut self, arrays: &StepArrays<'_>, before: &[Cell<i32>]) {
        let field = |at: usize| arrays.header[at].get() as usize;
        for at in 0..field(header::NUM_PENDING) {
            // Where a logit was not finite there is no token, and the step's result is for nobody.
            let token = before[arrays.source[at].get() as usize].get().max(0);
            arrays.token_ids[at].set(token);
        }
        let digests = &mut self.digests;
        digests.clear();
        for seq in 0..field(header::NUM_SEQS) {
            let table = &arrays.block_table[arrays.rows[seq].get() as usize * self.max_blocks..];
            let (from, to) = (
                arrays.query_start[seq].get(),
                arrays.query_start[seq + 1].get(),
            );
            for at in from as usize..to as usize {
                let position = arrays.positions[at].get() as usize;
                let before = position.checked_sub(1).map_or(0, |p| {
                    let block = table[p / self.block_size].get() as usize;
                    self.cache[block * self.block_size + p % self.block_size]
                });
                let digest = extend(before, arrays.token_ids[at].get() as u32);
                digests.push(digest);
                self.cache[arrays.slot_mapping[at].get() as usize] = digest;
            }
            let last = arrays.positions[to as usize - 1].get();
            assert_eq!(
                arrays.seq_lens[seq].get(),
                last + 1,
                "context length of request {seq}"
            );
        }
        for sample in 0..field(header::NUM_SAMPLES) {
            let digest = digests[arrays.logits_index[sample].get() as usize];
            arrays.sampled[sample].set(predict(digest, self.vocab) as i32);
        }
    }

    /// Answers the engine's question for a planned step's prompt log-probabilities, if it has one. The
    /// alternatives of a row are told by their place.
    pub fn report_prompts(
        &self,
        engine: &mut Engine,
        slot: usize,
        arrays: &StepArrays<'_>,
    ) -> Result<(), StepError> {
        let rows = arrays.header[header::NUM_PROMPT_ROWS].get() as usize;
        if rows == 0 {
            return Ok(());
        }
        let width = arrays.header[header::NUM_PROMPT_LOGPROBS].get() as usize;
        let (index, target) = (vec![Cell::new(0); rows], vec![Cell::new(0); rows]);
        let written = engine.prompt_rows(slot, &index, &target)?;
        assert_eq!(written, rows, "the header counts the rows");
        let judged = index.iter().zip(&target).map(|(index, target)| {
            let digest = self.digests[index.get() as usize];
            Cell::new(judge(digest, target.get() as u32))
        });
        let judged: Vec<_> = judged.collect();
        let ids: Vec<_> = (0..rows * width)
            .map(|at| Cell::new((at % width) as i32))
            .collect();
        let logprobs: Vec<_> = (0..rows * width)
            .map(|at| Cell::new(-((at % width) as f32)))
            .collect();
        let found = PromptRows {
            logprob: &judged,
            rank: &target,
            top_ids: &ids,
            top_logprobs: &logprobs,
        };
        engine.take_prompt_logprobs(slot, &found)
    }
}

/// An engine with its arrays and a made-up model.
pub struct Simulation {
    /// The engine.
    pub engine: Engine,
    /// The arrays of slot 0.
    pub arrays: OwnedArrays,
    /// What the last step handed on.
    pub output: StepOutput,
    /// Whether each step is planned before the one before it is computed.
    pub overlapped: bool,
    second: OwnedArrays,
    /// The slot of the step that is planned and not computed.
    planned: Option<usize>,
    model: ShadowModel,
    next_id: RequestId,
}

impl Simulation {
    /// A simulation over token ids below `vocab`.
    pub fn new(config: EngineConfig, eos: Vec<u32>, vocab: u32) -> Result<Self, ConfigError> {
        let engine = Engine::new(config, eos)?;
        Ok(Self {
            arrays: OwnedArrays::new(engine.config()),
            output: StepOutput::default(),
            overlapped: false,
            second: OwnedArrays::new(engine.config()),
            planned: None,
            model: ShadowModel::new(engine.config(), vocab),
            next_id: 0,
            engine,
        })
    }

    /// Queues a request; returns the id of its first choice.
    pub fn submit(&mut self, request: NewRequest) -> RequestId {
        let first = self.next_id;
        self.next_id += u64::from(request.n);
        self.send(Command::Add {
            first,
            request: Box::new(request),
            arrival: Arrival::default(),
        });
        first
    }

    /// Sends a command.
    pub fn send(&mut self, command: Command) {
        self.engine.apply([command]);
    }

    /// One step. Returns the tokens computed; `output` holds what was handed on.
    pub fn step(&mut self) -> Result<u32, StepError> {
        self.step_with(|_, _| ())
    }

    /// A step in which `meddle` may change what the model sampled, or send commands, before it is
    /// committed.
    pub fn step_with(
        &mut self,
        meddle: impl FnOnce(&mut Engine, &StepArrays<'_>),
    ) -> Result<u32, StepError> {
        self.advance(|engine, slot, arrays| {
            meddle(engine, arrays);
            engine.commit(slot, arrays)
        })
    }

    /// A step whose forward pass fails.
    pub fn fail_step(&mut self, reason: &str) -> Result<u32, StepError> {
        self.advance(|engine, slot, _| engine.fail_step(slot, reason))
    }

    /// Plans a step, unless one waits and overlap is off; then computes the one before, if overlapped, and has
    /// it ended. Returns the tokens of the step that was planned, or of the one that was ended.
    fn advance(
        &mut self,
        end: impl FnOnce(&mut Engine, usize, &StepArrays<'_>) -> Result<(), StepError>,
    ) -> Result<u32, StepError> {
        let views = [self.arrays.view(), self.second.view()];
        let next = self.planned.map_or(0, |before| 1 - before);
        let mut tokens = self.engine.plan(next, &views[next])?;
        let next = (tokens > 0).then_some(next);
        let due = if self.overlapped {
            std::mem::replace(&mut self.planned, next)
        } else {
            next
        };
        if let Some(slot) = due {
            let arrays = &views[slot];
            self.model.forward(arrays, views[1 - slot].sampled);
            self.model.report_prompts(&mut self.engine, slot, arrays)?;
            end(&mut self.engine, slot, arrays)?;
            tokens = tokens.max(arrays.header[header::NUM_TOKENS].get() as u32);
        }
        self.engine.take_output(&mut self.output);
        Ok(tokens)
    }
}
