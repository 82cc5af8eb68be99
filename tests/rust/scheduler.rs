//! The engine against a naive reference: whatever the program of submits, cancels, pauses, failures and
//! steps, each request gets exactly the tokens that its prompt implies, once, and the state stays consistent.

#[path = "scheduler/starvation.rs"]
mod starvation;

use std::collections::HashMap;

use miniinfer_core::arrays::header;
use miniinfer_core::block::ExtraKey;
use miniinfer_core::prompt_logprobs::PromptLogprobs;
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::sim::{Simulation, continuation, prompt_logprobs};
use miniinfer_core::step::EndReason;
use miniinfer_core::{Command, EngineConfig, NgramLookup};
use proptest::prelude::*;

/// Ids of prompts are below this.
const VOCAB: u32 = 23;

/// How many ids a model may sample: where they are few, many of those that are looked up are right.
fn vocab() -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(VOCAB), 1 => 2..5u32]
}

#[derive(Clone, Debug)]
struct Ask {
    prompt: Vec<u32>,
    max_tokens: Option<u32>,
    n: u32,
    priority: i32,
    tenant: u8,
    salt: bool,
    ignore_eos: bool,
    min_tokens: u32,
    prompt_logprobs: Option<u32>,
}

#[derive(Clone, Debug)]
enum Op {
    Submit(Ask),
    Step,
    Cancel(u8),
    Stop(u8),
    Pause(u8),
    Resume(u8),
    Draft(u8, bool),
    Reset,
    /// The forward pass of a step fails.
    FailStep,
    /// One sample of a step is not finite.
    BadSample(u8),
    /// A step, and messages that come while it is in flight.
    Meddle(Vec<(u8, u8)>),
}

fn ask(max_len: u32) -> impl Strategy<Value = Ask> {
    // Few distinct prompts, so that prefixes are shared.
    let prompt = (1..max_len, 0..3u32).prop_map(|(len, kind)| {
        (0..len)
            .map(|at| (at * (kind + 1)) % VOCAB)
            .collect::<Vec<_>>()
    });
    (
        prompt,
        prop::option::of(1..12u32),
        prop_oneof![4 => Just(1u32), 1 => 2..4u32],
        prop_oneof![3 => Just(0), 1 => -1..2i32],
        prop_oneof![3 => 0..3u8, 1 => any::<u8>()],
        any::<bool>(),
        any::<bool>(),
        0..4u32,
        prop_oneof![3 => Just(None), 1 => prop::option::of(0..4u32)],
    )
        .prop_map(
            move |(
                prompt,
                max_tokens,
                n,
                priority,
                tenant,
                salt,
                ignore_eos,
                min_tokens,
                prompt_logprobs,
            )| {
                let room = max_len - prompt.len() as u32;
                let max_tokens = max_tokens.map(|m| m.min(room));
                let min_tokens = min_tokens.min(max_tokens.unwrap_or(room));
                Ask {
                    prompt,
                    max_tokens,
                    n,
                    priority,
                    tenant,
                    salt,
                    ignore_eos,
                    min_tokens,
                    prompt_logprobs,
                }
            },
        )
}

fn op(max_len: u32) -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => ask(max_len).prop_map(Op::Submit),
        12 => Just(Op::Step),
        2 => any::<u8>().prop_map(Op::Cancel),
        1 => any::<u8>().prop_map(Op::Stop),
        1 => any::<u8>().prop_map(Op::Pause),
        1 => any::<u8>().prop_map(Op::Resume),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(id, good)| Op::Draft(id, good)),
        1 => Just(Op::Reset),
        1 => Just(Op::FailStep),
        1 => any::<u8>().prop_map(Op::BadSample),
        1 => prop::collection::vec((0..4u8, any::<u8>()), 1..4).prop_map(Op::Meddle),
    ]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let budget = prop_oneof![1 => Just(0u32), 3 => 0..40u32];
    let guard = (0..5u32, 0..7u32, prop::option::of(Just(1e-6)));
    let lookup = (1..4u32, 0..3u32, prop_oneof![Just(0.5f32), Just(1e6)]);
    (
        1..5u32,
        1..6u32,
        budget,
        0..30u32,
        any::<bool>(),
        (0..5u32, prop::option::of(lookup)),
        guard,
    )
        .prop_map(
            |(block_size, seqs, budget, blocks, enable_prefix_caching, drafts, guard)| {
                let num_blocks = 4 + blocks;
                // With a target that no step meets, prefills always get the least.
                let (max_draft_tokens, lookup) = drafts;
                let lookup = lookup.filter(|_| max_draft_tokens > 0);
                let (max_skips, max_skipped_steps, target_itl_ms) = guard;
                EngineConfig {
                    block_size,
                    num_blocks,
                    max_num_seqs: seqs,
                    max_num_batched_tokens: seqs + budget,
                    // Some requests need all of the cache.
                    max_model_len: (num_blocks * block_size).min(48),
                    max_draft_tokens,
                    ngram_lookup: lookup.map(|(min, more, rows_per_step)| NgramLookup {
                        min,
                        max: min + more,
                        rows_per_step,
                    }),
                    enable_prefix_caching,
                    target_itl_ms,
                    max_skips,
                    max_skipped_steps,
                    ..EngineConfig::default()
                }
            },
        )
}

/// What a request must get, and what it has got.
struct Expected {
    tokens: Vec<u32>,
    end: EndReason,
    got: Vec<u32>,
    ended: Option<EndReason>,
    stopped: bool,
    prompt_logprobs: Option<PromptLogprobs>,
    reported: Option<PromptLogprobs>,
}

/// What a request is to be told of its prompt.
fn prompt_of(prompt: &[u32], id: u64, width: usize) -> PromptLogprobs {
    let rest = &prompt[1..];
    let places = || rest.iter().flat_map(|_| 0..width as u32);
    PromptLogprobs {
        id,
        top_width: width,
        tokens: rest.to_vec(),
        logprobs: prompt_logprobs(prompt),
        ranks: rest.to_vec(),
        top_ids: places().collect(),
        top_logprobs: places().map(|place| -(place as f32)).collect(),
    }
}

struct World {
    sim: Simulation,
    vocab: u32,
    eos: u32,
    requests: HashMap<u64, Expected>,
}

impl World {
    fn submit(&mut self, ask: &Ask) {
        let config = self.sim.engine.config();
        let limit = config.max_model_len as usize - ask.prompt.len();
        let limit = ask.max_tokens.map_or(limit, |m| m as usize);
        let mut tokens = Vec::new();
        let mut end = EndReason::Length;
        for token in continuation(&ask.prompt, self.vocab).take(limit) {
            tokens.push(token);
            if token == self.eos && !ask.ignore_eos && tokens.len() > ask.min_tokens as usize {
                end = EndReason::Eos(self.eos);
                break;
            }
        }
        let request = NewRequest {
            prompt: ask.prompt.clone(),
            sampling: SamplingSpec {
                max_tokens: ask.max_tokens,
                ignore_eos: ask.ignore_eos,
                min_tokens: ask.min_tokens,
                ..SamplingSpec::default()
            },
            n: ask.n,
            priority: ask.priority,
            tenant: format!("tenant {}", ask.tenant).into(),
            extra_keys: if ask.salt {
                vec![ExtraKey::Salt("s".into())]
            } else {
                Vec::new()
            },
            num_prompt_logprobs: ask.prompt_logprobs,
            ..NewRequest::default()
        };
        request
            .validate(config.max_model_len, config.max_logprobs)
            .expect("asks are valid");
        let first = self.sim.submit(request);
        for id in first..first + u64::from(ask.n) {
            let expected = Expected {
                tokens: tokens.clone(),
                end: end.clone(),
                got: Vec::new(),
                ended: None,
                stopped: false,
                prompt_logprobs: ask
                    .prompt_logprobs
                    .filter(|_| id == first)
                    .map(|width| prompt_of(&ask.prompt, id, width as usize)),
                reported: None,
            };
            self.requests.insert(id, expected);
        }
    }

    fn id(&self, pick: u8) -> u64 {
        // Now and then an id that was never given out.
        u64::from(pick) % (self.requests.len() as u64 + 1)
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Submit(ask) => self.submit(ask),
            Op::Step => {
                self.step();
            }
            Op::Cancel(pick) => self.sim.send(Command::Cancel(self.id(*pick))),
            Op::Stop(pick) => {
                let id = self.id(*pick);
                self.sim.send(Command::Stop(id));
                if let Some(request) = self.requests.get_mut(&id) {
                    request.stopped = true;
                }
            }
            Op::Pause(pick) => self.pause(self.id(*pick), true),
            Op::Resume(pick) => self.pause(self.id(*pick), false),
            Op::Draft(pick, good) => {
                let id = self.id(*pick);
                if let Some(request) = self.requests.get(&id) {
                    let next = request.tokens[request.got.len()..].iter().take(2);
                    let drafts = next.map(|&t| if *good { t } else { t ^ 1 }).collect();
                    self.sim.send(Command::Draft(id, drafts));
                }
            }
            Op::Reset => self.sim.send(Command::ResetPrefixCache),
            Op::FailStep => {
                self.sim.fail_step("failed").expect("the protocol is kept");
                self.collect();
            }
            Op::BadSample(pick) => {
                let step = self.sim.step_with(|_, arrays| {
                    let samples = arrays.header[header::NUM_SAMPLES].get() as usize;
                    if samples > 0 {
                        arrays.sampled[*pick as usize % samples].set(-1);
                    }
                });
                step.expect("the protocol is kept");
                self.collect();
            }
            Op::Meddle(messages) => self.meddle(messages),
        }
        self.sim.engine.check().expect("consistent");
    }

    /// Messages that come while a step is in flight take effect after it.
    fn meddle(&mut self, messages: &[(u8, u8)]) {
        let ids = messages.iter().map(|&(kind, pick)| (kind, self.id(pick)));
        let messages: Vec<_> = ids.collect();
        let commands = messages.iter().map(|&(kind, id)| match kind {
            0 => Command::Cancel(id),
            1 => Command::Stop(id),
            2 => Command::Pause(id),
            _ => Command::Resume(id),
        });
        let commands: Vec<_> = commands.collect();
        let mut sent = false;
        let step = self.sim.step_with(|engine, _| {
            engine.apply(commands);
            sent = true;
        });
        step.expect("the protocol is kept");
        self.collect();
        if !sent {
            return;
        }
        for (kind, id) in messages {
            if let Some(request) = self.requests.get_mut(&id) {
                request.stopped |= kind == 1;
            }
        }
    }

    fn pause(&mut self, id: u64, paused: bool) {
        self.sim.send(if paused {
            Command::Pause(id)
        } else {
            Command::Resume(id)
        });
    }

    fn step(&mut self) -> u32 {
        let had_work = self.sim.engine.has_work();
        let tokens = self.sim.step().expect("the protocol is kept");
        assert!(tokens > 0 || !had_work, "work to do, but nothing scheduled");
        assert!(tokens <= self.sim.engine.config().max_num_batched_tokens);
        self.collect();
        tokens
    }

    fn collect(&mut self) {
        for prompt in &self.sim.output.prompt_logprobs {
            let request = self
                .requests
                .get_mut(&prompt.id)
                .expect("a request of ours");
            assert!(request.got.is_empty(), "the prompt comes before the tokens");
            let before = request.reported.replace(prompt.clone());
            assert_eq!(before, None, "a prompt is reported once");
        }
        let mut delivered = self.sim.output.tokens.iter().copied();
        for entry in &self.sim.output.entries {
            let request = self.requests.get_mut(&entry.id).expect("a request of ours");
            assert!(
                request.ended.is_none(),
                "request {} spoke after its end",
                entry.id
            );
            assert!(
                !request.stopped || entry.num_tokens == 0,
                "stopped requests are silent"
            );
            request
                .got
                .extend(delivered.by_ref().take(entry.num_tokens as usize));
            request.ended.clone_from(&entry.end);
        }
        assert_eq!(delivered.next(), None, "each token belongs to an entry");
    }

    /// Runs until nothing is left. Every request must end within the bound.
    fn finish(&mut self) {
        let ids: Vec<u64> = self.requests.keys().copied().collect();
        for id in ids {
            self.pause(id, false);
        }
        // Alone, a request takes one step per token at most. Others can preempt it, but the oldest of the
        // most urgent class never loses its blocks, so that in the worst case all run one after the other.
        let alone: usize = self.requests.values().map(|r| r.tokens.len() + 50).sum();
        // Overlapped, it may have every second step only.
        let bound = (alone + 50) * if self.sim.overlapped { 2 } else { 1 };
        let mut steps = 0;
        // What was submitted while a step is in flight is known once that ends.
        while self.sim.engine.num_requests() > 0 || self.sim.engine.in_flight() {
            self.step();
            self.sim.engine.check().expect("consistent");
            steps += 1;
            assert!(steps <= bound, "not finished after {bound} steps");
        }
        // The ends of requests that were cancelled last are still to be handed on, and a step that was planned
        // for them is to be computed.
        self.step();
        self.sim.engine.check().expect("consistent");
        for (id, request) in &self.requests {
            let expected = &request.tokens[..request.got.len()];
            assert_eq!(request.got, expected, "request {id} got other tokens");
            if !request.got.is_empty() || request.reported.is_some() {
                assert_eq!(request.reported, request.prompt_logprobs, "request {id}");
            }
            match &request.ended {
                None => assert!(request.stopped, "request {id} ended without a word"),
                Some(EndReason::Abort) => {}
                Some(EndReason::Error(reason)) => {
                    let known = ["failed", "the model produced logits that are not finite"];
                    assert!(known.contains(&&**reason), "{reason}");
                }
                Some(end) => {
                    assert_eq!(end, &request.end);
                    assert_eq!(request.got.len(), request.tokens.len());
                }
            }
        }
        let stats = self.sim.engine.stats();
        let delivered: usize = self
            .requests
            .values()
            .map(|request| request.got.len())
            .sum();
        assert_eq!(stats.counters.generation_tokens, delivered as u64);
        assert!(stats.counters.accepted_tokens <= stats.counters.draft_tokens);
        assert_eq!(self.sim.engine.num_ended(), self.requests.len() as u64);
        assert_eq!(
            (stats.num_running, stats.num_waiting, stats.blocks_used),
            (0, 0, 0)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_program_gives_each_request_its_own_tokens(
        vocab in vocab(),
        (config, ops) in config().prop_flat_map(|config| {
            let max_len = config.max_model_len;
            (Just(config), prop::collection::vec(op(max_len), 1..80))
        }),
        // One step at a time, overlapped, and overlapped where no drafts prevent it.
        (overlapped, drafting) in prop_oneof![
            Just((false, true)),
            Just((true, true)),
            Just((true, false)),
        ],
    ) {
        let mut config = config;
        if !drafting {
            (config.max_draft_tokens, config.ngram_lookup) = (0, None);
        }
        let eos = 7.min(vocab - 1);
        let mut sim = Simulation::new(config, vec![eos], vocab).expect("a valid configuration");
        sim.overlapped = overlapped;
        let mut world = World { sim, vocab, eos, requests: HashMap::new() };
        for op in &ops {
            world.run(op);
        }
        world.finish();
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(500)
}
