//! A simulation that remembers what each request asked and got, and verifies the state after each step.

use std::collections::HashMap;

use miniinfer_core::arrays::{StepArrays, header};
use miniinfer_core::request::{NewRequest, RequestId, SamplingSpec};
use miniinfer_core::sim::{Simulation, continuation};
use miniinfer_core::stats::Stats;
use miniinfer_core::step::EndReason;
use miniinfer_core::{Command, Engine, EngineConfig};

/// Sampled ids are below this; prompts of [`tagged`] are above it.
pub const VOCAB: u32 = 97;

/// A prompt of one token repeated, which no output holds: steps can be searched for it.
pub fn tagged(tag: u32, len: usize) -> Vec<u32> {
    vec![1000 + tag; len]
}

/// A prompt of distinct tokens, none of which another `kind` has.
pub fn prompt(kind: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| kind * 10_000 + at).collect()
}

/// `max_tokens` tokens after a prompt, for the tenant without a name.
pub fn ask(prompt: Vec<u32>, max_tokens: u32) -> NewRequest {
    NewRequest {
        prompt,
        n: 1,
        sampling: SamplingSpec {
            max_tokens: Some(max_tokens),
            ..SamplingSpec::default()
        },
        ..NewRequest::default()
    }
}

/// A small engine: blocks of 4.
pub fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_blocks: 64,
        max_num_seqs: 8,
        max_num_batched_tokens: 32,
        max_model_len: 128,
        ..EngineConfig::default()
    }
}

/// What a request has got so far.
#[derive(Default)]
pub struct Got {
    pub tokens: Vec<u32>,
    pub end: Option<EndReason>,
    pub cached: u32,
    prompt: Vec<u32>,
    max_tokens: Option<u32>,
}

pub struct World {
    pub sim: Simulation,
    pub got: HashMap<RequestId, Got>,
    /// Requests that spoke in the last step, and with how many tokens.
    pub spoke: Vec<(RequestId, u32)>,
}

impl World {
    pub fn new(config: EngineConfig) -> Self {
        Self::with_eos(config, vec![])
    }

    pub fn with_eos(config: EngineConfig, eos: Vec<u32>) -> Self {
        Self {
            sim: Simulation::new(config, eos, VOCAB).expect("a valid configuration"),
            got: HashMap::new(),
            spoke: Vec::new(),
        }
    }

    pub fn submit(&mut self, request: NewRequest) -> RequestId {
        let config = self.sim.engine.config();
        request
            .validate(config.max_model_len, config.max_logprobs)
            .expect("a valid request");
        let n = request.n;
        let first = self.sim.submit(request.clone());
        for id in first..first + u64::from(n) {
            self.know(id, &request);
        }
        first
    }

    /// Awaits what a request gets that was sent under this id.
    pub fn know(&mut self, id: RequestId, request: &NewRequest) {
        let got = Got {
            prompt: request.prompt.clone(),
            max_tokens: request.sampling.max_tokens,
            ..Got::default()
        };
        self.got.insert(id, got);
    }

    pub fn send(&mut self, command: Command) {
        self.sim.send(command);
        self.sim.engine.check().expect("consistent");
    }

    pub fn cancel(&mut self, id: RequestId) {
        self.send(Command::Cancel(id));
    }

    pub fn step(&mut self) -> u32 {
        self.step_with(|_, _| ())
    }

    pub fn step_with(&mut self, meddle: impl FnOnce(&mut Engine, &StepArrays<'_>)) -> u32 {
        let had_work = self.sim.engine.has_work();
        let tokens = self.sim.step_with(meddle).expect("the protocol is kept");
        assert!(tokens > 0 || !had_work, "work to do, but nothing scheduled");
        assert!(tokens <= self.sim.engine.config().max_num_batched_tokens);
        self.collect();
        tokens
    }

    pub fn fail_step(&mut self, reason: &str) {
        self.sim.fail_step(reason).expect("the protocol is kept");
        self.collect();
    }

    /// Takes in what the engine handed on.
    pub fn collect(&mut self) {
        self.sim.engine.check().expect("consistent");
        self.spoke.clear();
        let mut tokens = self.sim.output.tokens.iter().copied();
        for entry in &self.sim.output.entries {
            let got = self.got.get_mut(&entry.id).expect("a request of ours");
            assert_eq!(got.end, None, "request {} spoke after its end", entry.id);
            got.tokens
                .extend(tokens.by_ref().take(entry.num_tokens as usize));
            got.end.clone_from(&entry.end);
            got.cached = entry.cached_tokens;
            self.spoke.push((entry.id, entry.num_tokens));
        }
        assert_eq!(tokens.next(), None, "each token belongs to an entry");
    }

    pub fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step();
        }
    }

    /// Steps until nothing is left to do; at most `bound` steps. Returns how many it took.
    pub fn run(&mut self, bound: usize) -> usize {
        let mut steps = 0;
        while self.sim.engine.has_work() {
            self.step();
            steps += 1;
            assert!(steps <= bound, "not done after {bound} steps");
        }
        self.step();
        steps
    }

    /// Steps until the request has a token; at most `bound` steps. Returns how many it took.
    pub fn until_token(&mut self, id: RequestId, bound: usize) -> usize {
        let mut steps = 0;
        while self.got[&id].tokens.is_empty() {
            self.step();
            steps += 1;
            assert!(steps <= bound, "no token of {id} after {bound} steps");
        }
        steps
    }

    /// The tokens that a request must get if nothing ends it early.
    pub fn expected(&self, id: RequestId) -> Vec<u32> {
        let got = &self.got[&id];
        let room = self.sim.engine.config().max_model_len as usize - got.prompt.len();
        let limit = got.max_tokens.map_or(room, |max| max as usize);
        continuation(&got.prompt, VOCAB).take(limit).collect()
    }

    /// A request got all of its tokens, and `Length`.
    pub fn assert_complete(&self, id: RequestId) {
        let got = &self.got[&id];
        assert_eq!(got.end, Some(EndReason::Length), "request {id}");
        assert_eq!(got.tokens, self.expected(id), "request {id}");
    }

    pub fn assert_all_complete(&self) {
        for &id in self.got.keys() {
            self.assert_complete(id);
        }
        self.assert_empty();
    }

    /// Nothing is alive, nothing is held.
    pub fn assert_empty(&self) {
        let stats = self.stats();
        let held = (stats.num_running, stats.num_waiting, stats.blocks_used);
        assert_eq!(held, (0, 0, 0), "running, waiting, blocks used");
    }

    pub fn has_ended(&self, id: RequestId) -> bool {
        self.got[&id].end.is_some()
    }

    pub fn stats(&self) -> Stats {
        self.sim.engine.stats()
    }

    /// Tokens of the last planned step.
    pub fn planned(&mut self) -> Vec<u32> {
        let arrays = self.sim.arrays.view();
        let tokens = arrays.header[header::NUM_TOKENS].get() as usize;
        let ids = arrays.token_ids[..tokens].iter();
        ids.map(|id| id.get() as u32).collect()
    }

    /// Tokens of the last planned step that belong to a [`tagged`] prompt.
    pub fn computed(&mut self, tag: u32) -> usize {
        let planned = self.planned();
        planned.iter().filter(|&&token| token == 1000 + tag).count()
    }
}
