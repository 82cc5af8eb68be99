//! The loads that the scheduler's benchmarks run: an engine, its arrays, and a stand-in for the model.

use miniinfer_core::arrays::{OwnedArrays, StepArrays, header};
use miniinfer_core::request::{Arrival, NewRequest, RequestId, SamplingSpec};
use miniinfer_core::step::StepOutput;
use miniinfer_core::{Command, Engine, EngineConfig, NgramLookup};

/// Ids that are given and sampled are below this.
const VOCAB: u32 = 50_000;

/// Decode steps that a fresh load has room for.
const STEPS: u32 = 512;

/// Prompts of the decoding requests: 64 to 191 tokens, so that blocks fill up at different steps.
const SHORTEST: u32 = 64;
const SPREAD: u32 = 128;

/// Tokens of the prompt that is admitted.
pub const PROMPT: u32 = 8192;

/// A token for each counter value, spread over the vocabulary.
fn token(counter: u32) -> u32 {
    (counter.wrapping_mul(0x9E37_79B1) >> 8) % VOCAB
}

/// An engine under way.
pub struct Load {
    pub engine: Engine,
    arrays: OwnedArrays,
    pub output: StepOutput,
    next_id: RequestId,
    counter: u32,
}

/// The stand-in for the model: a new token for each sample, and nothing else.
fn sample(arrays: &StepArrays<'_>, counter: &mut u32) {
    let samples = arrays.header[header::NUM_SAMPLES].get() as usize;
    for sampled in &arrays.sampled[..samples] {
        *counter = counter.wrapping_add(1);
        sampled.set(token(*counter) as i32);
    }
}

impl Load {
    pub fn new(config: EngineConfig) -> Self {
        let engine = Engine::new(config, vec![VOCAB]).expect("a valid configuration");
        Self {
            arrays: OwnedArrays::new(engine.config()),
            output: StepOutput::default(),
            next_id: 1,
            counter: 0,
            engine,
        }
    }

    /// `running` requests that decode, their prompts computed, and `waiting` more behind them. With `drafting`, tokens
    /// are looked up that never occur again.
    pub fn decoding(running: u32, waiting: u32, drafting: bool) -> Self {
        let block_size = 16;
        let budget = 8192;
        let prompt = SHORTEST + SPREAD;
        // The first to decode do so while the prompts of the others are computed.
        let prefill_steps = 2 * running * prompt / budget + 2;
        let longest = prompt + prefill_steps + STEPS;
        let mut load = Self::new(EngineConfig {
            block_size,
            // One more for each: admission keeps as many free.
            num_blocks: running * (longest.div_ceil(block_size) + 1),
            max_num_seqs: running,
            max_num_batched_tokens: budget,
            max_model_len: 2048,
            max_draft_tokens: if drafting { 4 } else { 0 },
            ngram_lookup: drafting.then_some(NgramLookup {
                min: 2,
                max: 4,
                rows_per_step: 8.0,
            }),
            ..EngineConfig::default()
        });
        for number in 0..running {
            load.submit(SHORTEST + number % SPREAD);
        }
        // A request that waits for its prompt has sampled nothing: all decode once each step samples all.
        while load.step() < running as usize {}
        for _ in 0..waiting {
            load.submit(SHORTEST);
        }
        load.step();
        load
    }

    /// Queues a prompt of its own of so many tokens.
    pub fn submit(&mut self, prompt: u32) -> RequestId {
        let prompt = (0..prompt).map(|_| self.next_token()).collect();
        self.submit_tokens(prompt)
    }

    pub fn submit_tokens(&mut self, prompt: Vec<u32>) -> RequestId {
        let id = self.next_id;
        self.next_id += 1;
        let command = Command::Add {
            first: id,
            request: Box::new(request(prompt, id)),
            arrival: Arrival::default(),
        };
        self.engine.apply([command]);
        id
    }

    fn next_token(&mut self) -> u32 {
        self.counter = self.counter.wrapping_add(1);
        token(self.counter)
    }

    /// A whole step, from plan to the output taken. Returns the number of tokens sampled.
    pub fn step(&mut self) -> usize {
        if self.plan() > 0 {
            self.commit();
        }
        self.output.tokens.len()
    }

    pub fn plan(&mut self) -> u32 {
        let arrays = self.arrays.view();
        self.engine.plan(0, &arrays).expect("the slot is free")
    }

    pub fn commit(&mut self) {
        let arrays = self.arrays.view();
        sample(&arrays, &mut self.counter);
        self.engine.commit(0, &arrays).expect("a step was planned");
        self.engine.take_output(&mut self.output);
    }
}

/// Decoding loads in turn, each as long as its room lasts.
pub struct Decoding {
    running: u32,
    waiting: u32,
    drafting: bool,
    load: Load,
    left: u32,
}

impl Decoding {
    pub fn new(running: u32, waiting: u32, drafting: bool) -> Self {
        Self {
            running,
            waiting,
            drafting,
            load: Load::decoding(running, waiting, drafting),
            left: STEPS,
        }
    }

    /// Preemptions so far in the load that is under way.
    pub fn preemptions(&self) -> u64 {
        self.load.engine.stats().counters.preemptions
    }

    /// Hands the load over for up to `steps` steps; returns how many it may make.
    pub fn take(&mut self, steps: u64) -> (u32, &mut Load) {
        if self.left == 0 {
            *self = Self::new(self.running, self.waiting, self.drafting);
        }
        let steps = u64::from(self.left).min(steps) as u32;
        self.left -= steps;
        (steps, &mut self.load)
    }
}

/// The prompt to admit: the same for each engine.
pub fn long_prompt() -> Vec<u32> {
    (0..PROMPT).map(|at| token(at ^ 0x5555_0000)).collect()
}

pub fn request(prompt: Vec<u32>, seed: u64) -> NewRequest {
    NewRequest {
        prompt,
        n: 1,
        sampling: SamplingSpec {
            temperature: 0.7,
            top_p: 0.9,
            seed,
            ..SamplingSpec::default()
        },
        ..NewRequest::default()
    }
}
