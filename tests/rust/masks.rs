//! Requests whose tokens a mask limits, through everything that can happen to a request.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use miniinfer_core::arrays::{StepArrays, header};
use miniinfer_core::error::StepError;
use miniinfer_core::grammar::{
    BadWords, CompiledGrammar, GrammarCompiler, GrammarSource, GrammarSpec, TokenLimits, Whitespace,
};
use miniinfer_core::request::{NewRequest, RequestId, SamplingSpec};
use miniinfer_core::sim::{Simulation, continuation};
use miniinfer_core::step::EndReason;
use miniinfer_core::text::TextModel;
use miniinfer_core::{Command, Engine, EngineConfig};

/// Every byte is a token of its own; one more ends an answer.
const END: u32 = 256;
const VOCAB: u32 = 257;
const WORDS: usize = 9;

static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let bytes = (0..=255u8).map(|byte| vec![byte]);
    let tokens: Vec<Vec<u8>> = bytes.chain([b"<|end|>".to_vec()]).collect();
    let model = TextModel::from_parts(&tokens, &[END]).expect("a small vocabulary");
    GrammarCompiler::new(model, VOCAB, vec![END])
});

fn compile(source: GrammarSource) -> Arc<CompiledGrammar> {
    let whitespace = Whitespace::Compact;
    let spec = GrammarSpec { source, whitespace };
    COMPILER.compile(&spec).expect("a grammar")
}

fn choice(text: &str) -> Arc<CompiledGrammar> {
    compile(GrammarSource::Choice(vec![text.into()]))
}

/// Some 100 tokens of JSON.
fn booleans() -> Arc<CompiledGrammar> {
    let schema =
        r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 18, "maxItems": 18}"#;
    compile(GrammarSource::JsonSchema(schema.into()))
}

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_blocks: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 32,
        max_model_len: 256,
        ..EngineConfig::default()
    }
}

fn ask(kind: u32, grammar: Option<Arc<CompiledGrammar>>) -> NewRequest {
    NewRequest {
        prompt: (0..20).map(|at| kind * 31 + at).collect(),
        n: 1,
        limits: TokenLimits {
            grammar,
            ..TokenLimits::default()
        },
        sampling: SamplingSpec {
            max_tokens: Some(150),
            ..SamplingSpec::default()
        },
        ..NewRequest::default()
    }
}

#[derive(Default)]
struct Got {
    tokens: Vec<u32>,
    end: Option<EndReason>,
}

impl Got {
    fn text(&self) -> String {
        let bytes = self.tokens.iter().filter(|&&token| token < 256);
        String::from_utf8_lossy(&bytes.map(|&token| token as u8).collect::<Vec<_>>()).into_owned()
    }
}

struct World {
    sim: Simulation,
    got: HashMap<RequestId, Got>,
}

impl World {
    fn new(config: EngineConfig) -> Self {
        let sim = Simulation::new(config, vec![END], VOCAB).expect("a valid configuration");
        let got = HashMap::new();
        Self { sim, got }
    }

    fn step(&mut self) -> u32 {
        let tokens = self.sim.step_with(obey).expect("the protocol is kept");
        self.collect();
        tokens
    }

    fn collect(&mut self) {
        self.sim.engine.check().expect("consistent");
        let mut tokens = self.sim.output.tokens.iter().copied();
        for entry in &self.sim.output.entries {
            let got = self.got.entry(entry.id).or_default();
            got.tokens
                .extend(tokens.by_ref().take(entry.num_tokens as usize));
            got.end.clone_from(&entry.end);
        }
    }

    fn run(&mut self) {
        for _ in 0..5000 {
            if !self.sim.engine.has_work() {
                return;
            }
            self.step();
        }
        panic!("no end in sight");
    }

    /// What a request gets that has an engine to itself.
    fn alone(request: NewRequest) -> Got {
        let mut world = Self::new(config());
        let id = world.sim.submit(request);
        world.run();
        world.got.remove(&id).expect("an answer")
    }
}

/// Samples as a model would that finds each allowed token as likely as another.
fn obey(engine: &mut Engine, arrays: &StepArrays<'_>) {
    let count = arrays.header[header::NUM_MASKS].get() as usize;
    let rows = vec![Cell::new(-1); 8];
    let bits = vec![Cell::new(-1); 8 * WORDS];
    let filled = engine.fill_masks(0, &rows, &bits).expect("room");
    assert_eq!(filled, count);
    for (row, mask) in rows.iter().zip(bits.chunks(WORDS)).take(filled) {
        let set = |id: &u32| mask[*id as usize / 32].get() & (1 << (id % 32)) != 0;
        let allowed: Vec<u32> = (0..WORDS as u32 * 32).filter(set).collect();
        assert!(!allowed.is_empty() && allowed.iter().all(|&id| id < VOCAB));
        let sampled = &arrays.sampled[row.get() as usize];
        sampled.set(allowed[sampled.get() as usize % allowed.len()] as i32);
    }
}

#[test]
fn an_answer_is_the_same_alone_and_in_chunks_batches_and_preemptions() {
    let grammar = booleans();
    let kinds: Vec<NewRequest> = (0..6)
        .map(|kind| ask(kind, (kind % 2 == 0).then(|| grammar.clone())))
        .collect();
    let mut world = World::new(EngineConfig {
        num_blocks: 64,
        max_num_batched_tokens: 9,
        ..config()
    });
    let ids: Vec<_> = kinds
        .iter()
        .map(|request| world.sim.submit(request.clone()))
        .collect();
    world.run();
    assert!(world.sim.engine.stats().counters.preemptions > 0);
    for (id, request) in ids.iter().zip(kinds) {
        let bound = request.limits.grammar.is_some();
        let prompt = request.prompt.clone();
        let (got, alone) = (&world.got[id], World::alone(request));
        assert_eq!(got.tokens, alone.tokens);
        assert_eq!(got.end, alone.end);
        if bound {
            assert_eq!(got.end, Some(EndReason::Eos(END)));
            let value: Vec<bool> = serde_json::from_str(&got.text()).expect("booleans");
            assert_eq!(value.len(), 18);
        } else {
            let count = got.tokens.len();
            let expected: Vec<u32> = continuation(&prompt, VOCAB).take(count).collect();
            assert_eq!(got.tokens, expected);
        }
    }
}

#[test]
fn a_pause_a_cancelled_neighbour_and_a_failed_step_change_no_other_answer() {
    let grammar = booleans();
    let mut world = World::new(config());
    let submit = |world: &mut World, kind| world.sim.submit(ask(kind, Some(grammar.clone())));
    let [paused, cancelled] = [0, 1].map(|kind| submit(&mut world, kind));
    for _ in 0..10 {
        world.step();
    }
    world.sim.send(Command::Pause(paused));
    for _ in 0..5 {
        world.step();
    }
    world.sim.send(Command::Cancel(cancelled));
    world.step();
    let failed = submit(&mut world, 2);
    world
        .sim
        .fail_step("a broken forward")
        .expect("the protocol is kept");
    world.collect();
    world.sim.send(Command::Resume(paused));
    world.run();
    assert_eq!(world.got[&cancelled].end, Some(EndReason::Abort));
    assert!(matches!(world.got[&failed].end, Some(EndReason::Error(_))));
    let alone = World::alone(ask(0, Some(grammar)));
    assert_eq!(world.got[&paused].tokens, alone.tokens);
    assert_eq!(world.got[&paused].end, Some(EndReason::Eos(END)));
}

#[test]
fn each_choice_has_a_place_of_its_own_in_the_grammar() {
    let mut world = World::new(config());
    let source = GrammarSource::Regex("[a-z]{3}".into());
    let first = world.sim.submit(NewRequest {
        n: 4,
        ..ask(0, Some(compile(source)))
    });
    world.run();
    for id in first..first + 4 {
        let got = &world.got[&id];
        assert_eq!(
            (got.text().len(), &got.end),
            (3, &Some(EndReason::Eos(END)))
        );
    }
}

#[test]
fn max_tokens_cuts_an_answer_and_says_so() {
    let mut request = ask(0, Some(booleans()));
    request.sampling.max_tokens = Some(7);
    let got = World::alone(request);
    assert_eq!((got.tokens.len(), got.end), (7, Some(EndReason::Length)));
}

#[test]
fn a_complete_grammar_ends_the_answer_whatever_else_is_asked() {
    for (ignore_eos, min_tokens) in [(true, 0), (false, 100), (true, 100)] {
        let mut request = ask(0, Some(choice("ab")));
        request.sampling.ignore_eos = ignore_eos;
        request.sampling.min_tokens = min_tokens;
        let got = World::alone(request);
        assert_eq!(got.text(), "ab");
        assert_eq!(got.end, Some(EndReason::Eos(END)));
    }
}

#[test]
fn min_tokens_puts_off_the_end_where_the_grammar_can_go_on() {
    for ignore_eos in [false, true] {
        let mut request = ask(0, Some(compile(GrammarSource::Regex("a*".into()))));
        request.sampling.min_tokens = 40;
        request.sampling.ignore_eos = ignore_eos;
        let got = World::alone(request);
        assert!(got.text().len() >= 40, "{ignore_eos}: {}", got.text());
        assert_eq!(got.end, Some(EndReason::Eos(END)));
    }
}

#[test]
fn a_grammar_begins_after_the_ids_that_it_waits_for() {
    let prompt = ask(3, None).prompt;
    let free: Vec<u32> = continuation(&prompt, VOCAB).take(12).collect();
    let mut request = ask(3, Some(choice("ab")));
    request.limits.grammar_after = free[5..7].to_vec();
    request.sampling.ignore_eos = true;
    let got = World::alone(request);
    assert_eq!(got.tokens[..7], free[..7]);
    assert_eq!(got.tokens[7..], [u32::from(b'a'), u32::from(b'b'), END]);
    assert_eq!(got.end, Some(EndReason::Eos(END)));
}

#[test]
fn only_allowed_ids_come_and_bad_words_do_not() {
    let mut request = ask(0, None);
    request.limits.allowed_token_ids = Some(vec![3, 5, 9]);
    request.limits.bad_words = BadWords::new([vec![3, 5], vec![9]]);
    let got = World::alone(request);
    assert_eq!(got.tokens.len(), 150);
    assert!(got.tokens.iter().all(|token| [3, 5].contains(token)));
    assert!(!got.tokens.windows(2).any(|pair| pair == [3, 5]));
}

#[test]
fn drafts_for_a_masked_request_are_left_aside() {
    let mut world = World::new(EngineConfig {
        max_draft_tokens: 4,
        ..config()
    });
    let id = world.sim.submit(ask(0, Some(choice("abcdef"))));
    world.step();
    let drafts = b"bcd".map(u32::from).to_vec();
    world.sim.send(Command::Draft(id, drafts));
    assert_eq!(world.step(), 1);
    world.run();
    assert_eq!(world.got[&id].text(), "abcdef");
}

#[test]
fn a_model_that_gives_no_allowed_token_a_chance_ends_its_request_alone() {
    let mut world = World::new(config());
    let bound = world.sim.submit(ask(0, Some(choice("ab"))));
    let free = world.sim.submit(ask(1, None));
    let broken = |engine: &mut Engine, arrays: &StepArrays<'_>| {
        obey(engine, arrays);
        arrays.sampled[0].set(0);
    };
    world.sim.step_with(broken).expect("the protocol is kept");
    world.collect();
    let Some(EndReason::Error(reason)) = &world.got[&bound].end else {
        panic!("{:?}", world.got[&bound].end);
    };
    assert!(reason.contains("allowed"), "{reason}");
    assert!(world.got[&bound].tokens.is_empty());
    world.run();
    assert_eq!(world.got[&free].tokens.len(), 150);
}

#[test]
fn masks_are_for_steps_in_flight_and_need_room() {
    let mut world = World::new(config());
    world.sim.submit(ask(0, Some(choice("ab"))));
    assert!(world.sim.engine.mask_work(0).is_err());
    let look = |engine: &mut Engine, arrays: &StepArrays<'_>| {
        assert_eq!(arrays.header[header::NUM_MASKS].get(), 1);
        assert_eq!(engine.mask_work(0).expect("in flight").len(), 1);
        let refused = engine.fill_masks(0, &[], &[]).expect_err("no room");
        let StepError::ArrayLength { needed, actual, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((needed, actual), (1, 0));
        obey(engine, arrays);
    };
    world.sim.step_with(look).expect("the protocol is kept");
}
