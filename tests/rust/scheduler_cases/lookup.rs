//! Drafts that are looked up in a request's own tokens.

use miniinfer_core::arrays::header;
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::sim::Simulation;
use miniinfer_core::stats::Counters;
use miniinfer_core::{Command, EngineConfig, NgramLookup};

use crate::world::{ask, config};

/// A model whose token at each position is given, whatever came before.
struct Text {
    sim: Simulation,
    token: fn(u32) -> u32,
    /// What request 0 got.
    got: Vec<u32>,
}

fn looking_up(max_draft_tokens: u32, rows_per_step: f32) -> EngineConfig {
    EngineConfig {
        max_draft_tokens,
        ngram_lookup: Some(NgramLookup {
            min: 2,
            max: 4,
            rows_per_step,
        }),
        ..config()
    }
}

/// Eleven different tokens over and over.
fn periodic(position: u32) -> u32 {
    position % 11
}

/// Pairs that occur again and again, but never with what followed the last time.
fn misleading(position: u32) -> u32 {
    match position % 3 {
        0 => 1,
        1 => 2,
        _ => 100 + position,
    }
}

/// Misleading for a hundred tokens.
fn quoted_later(position: u32) -> u32 {
    if position < 100 {
        misleading(position)
    } else {
        periodic(position)
    }
}

impl Text {
    fn new(config: EngineConfig, token: fn(u32) -> u32) -> Self {
        Self {
            sim: Simulation::new(config, vec![], 1000).expect("a valid configuration"),
            token,
            got: Vec::new(),
        }
    }

    fn prompt(&self, len: u32) -> Vec<u32> {
        (0..len).map(self.token).collect()
    }

    fn submit(&mut self, len: u32, max_tokens: u32) {
        let request = ask(self.prompt(len), max_tokens);
        self.sim.submit(request);
    }

    /// A step; returns its tokens and sequences.
    fn step(&mut self) -> (u32, u32) {
        let mut sequences = 0;
        let token = self.token;
        let tokens = self.sim.step_with(|_, arrays| {
            let field = |at: usize| arrays.header[at].get() as usize;
            sequences = field(header::NUM_SEQS) as u32;
            for sample in 0..field(header::NUM_SAMPLES) {
                let at = arrays.logits_index[sample].get() as usize;
                let next = token(arrays.positions[at].get() as u32 + 1);
                arrays.sampled[sample].set(next as i32);
            }
        });
        self.sim.engine.check().expect("consistent");
        let mut tokens_of_step = self.sim.output.tokens.iter();
        for entry in &self.sim.output.entries {
            let own = tokens_of_step.by_ref().take(entry.num_tokens as usize);
            if entry.id == 0 {
                self.got.extend(own);
            } else {
                own.for_each(drop);
            }
        }
        (tokens.expect("the protocol is kept"), sequences)
    }

    /// Steps until all requests have ended; returns how many.
    fn run(&mut self) -> u32 {
        let mut steps = 0;
        while self.sim.engine.has_work() {
            self.step();
            steps += 1;
            assert!(steps < 1000, "no end");
        }
        steps
    }

    fn counters(&self) -> Counters {
        self.sim.engine.stats().counters
    }
}

#[test]
fn a_quotation_comes_several_tokens_at_a_time() {
    let mut text = Text::new(looking_up(4, 8.0), periodic);
    text.submit(26, 100);
    let steps = text.run();
    let expected: Vec<u32> = (26..126).map(periodic).collect();
    assert_eq!(text.got, expected);
    let counters = text.counters();
    assert_eq!(counters.accepted_tokens, counters.draft_tokens);
    assert_eq!(counters.generation_tokens, 100);
    // The prompt is one step; all others but the first few have four drafts, and the last as many as are left.
    assert!(steps <= 1 + 22, "{steps}");
    assert_eq!(u64::from(steps) - 1, counters.drafts);
}

#[test]
fn each_draft_is_a_decode_of_its_own() {
    let mut text = Text::new(looking_up(3, 1e6), periodic);
    text.submit(26, 40);
    assert_eq!(text.step(), (26, 1));
    assert_eq!(text.step(), (4, 4));
    let arrays = text.sim.arrays.view();
    let first = |cells: &[std::cell::Cell<i32>]| [0, 1, 2, 3].map(|at| cells[at].get());
    assert_eq!(first(arrays.positions), [26, 27, 28, 29]);
    assert_eq!(first(arrays.seq_lens), [27, 28, 29, 30]);
    assert_eq!(first(&arrays.query_start[1..]), [1, 2, 3, 4]);
    let row = arrays.rows[0].get();
    assert_eq!(first(arrays.rows), [row; 4]);
    assert_eq!(arrays.header[header::NUM_DECODES].get(), 4);
    assert_eq!(arrays.header[header::MAX_QUERY_LEN].get(), 1);
}

/// The worst case of speculation: text that looks like a quotation and is none.
#[test]
fn guesses_that_are_wrong_are_soon_not_verified_any_more() {
    let mut text = Text::new(looking_up(4, 8.0), misleading);
    text.submit(9, 110);
    text.run();
    let counters = text.counters();
    assert_eq!(counters.accepted_tokens, 0);
    assert!((1..=20).contains(&counters.draft_tokens), "{counters:?}");
}

#[test]
fn guesses_that_have_become_right_are_verified_again() {
    let mut text = Text::new(looking_up(4, 8.0), quoted_later);
    text.submit(9, 100);
    text.run();
    let before = text.counters();
    assert_eq!((before.accepted_tokens, text.got.len()), (0, 100));
    let mut text = Text::new(looking_up(4, 8.0), quoted_later);
    text.submit(9, 119);
    let mut lens = Vec::new();
    while text.sim.engine.has_work() {
        text.step();
        lens.push(text.got.len());
    }
    let at_once = lens.windows(2).map(|pair| pair[1] - pair[0]).max();
    assert!(at_once >= Some(2), "{lens:?}");
    let expected: Vec<u32> = (9..128).map(quoted_later).collect();
    assert_eq!(text.got, expected);
}

#[test]
fn drafts_must_be_the_likelier_the_more_requests_there_are() {
    // Of a new request's guesses half are taken to be right: 0.5 > 1 / 2.5, but 0.5 < 8 / 9.5.
    for (requests, drafts) in [(1, 1), (8, 0)] {
        let config = EngineConfig {
            max_num_batched_tokens: 256,
            ..looking_up(3, 1.5)
        };
        let mut text = Text::new(config, periodic);
        for _ in 0..requests {
            text.submit(26, 100);
        }
        text.step();
        text.step();
        assert_eq!(text.counters().draft_tokens, drafts, "{requests} requests");
    }
}

#[test]
fn requests_with_penalties_have_no_drafts() {
    let mut text = Text::new(looking_up(4, 8.0), periodic);
    let request = NewRequest {
        sampling: SamplingSpec {
            presence_penalty: 0.5,
            max_tokens: Some(40),
            ..SamplingSpec::default()
        },
        ..ask(text.prompt(26), 40)
    };
    text.sim.submit(request);
    text.run();
    assert_eq!((text.counters().drafts, text.got.len()), (0, 40));
}

#[test]
fn drafts_that_were_sent_go_first() {
    let mut text = Text::new(looking_up(4, 1e6), periodic);
    text.submit(26, 40);
    text.step();
    text.sim.send(Command::Draft(0, vec![periodic(27)]));
    assert_eq!(text.step().0, 2);
    assert_eq!(text.got.len(), 3);
}

#[test]
fn a_long_prompt_is_taken_in_over_several_steps() {
    let mut text = Text::new(
        EngineConfig {
            num_blocks: 11_000,
            max_model_len: 44_000,
            max_num_batched_tokens: 40_000,
            ..looking_up(4, 8.0)
        },
        periodic,
    );
    text.submit(40_000, 20);
    text.step();
    let drafts: Vec<u64> = (0..4)
        .map(|_| {
            text.step();
            text.counters().drafts
        })
        .collect();
    assert_eq!(drafts, [0, 0, 1, 2]);
    text.run();
    let expected: Vec<u32> = (40_000..40_020).map(periodic).collect();
    assert_eq!(text.got, expected);
}
