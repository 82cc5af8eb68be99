//! An engine and its clients with bytes between them, and bytes that no client or engine would send.

use std::collections::HashMap;
use std::sync::Arc;

use miniinfer_core::arrays::OwnedArrays;
use miniinfer_core::block::ExtraKey;
use miniinfer_core::error::SubmitError;
use miniinfer_core::frontend::Submission;
use miniinfer_core::grammar::{
    BadWords, GrammarCompiler, GrammarSource, GrammarSpec, TokenLimits, Whitespace,
};
use miniinfer_core::pipeline::StreamDelta;
use miniinfer_core::request::{Arrival, NewRequest, SamplingSpec};
use miniinfer_core::sim::{ShadowModel, continuation};
use miniinfer_core::stall::StallPolicy;
use miniinfer_core::stats::Stats;
use miniinfer_core::step::{EndReason, OutputEntry, StepOutput};
use miniinfer_core::text::{FinishReason, StreamSpec, TextModel};
use miniinfer_core::wire::client::{Client, ClientSpec};
use miniinfer_core::wire::command::{ADD, RESET, pack_commands, unpack_message};
use miniinfer_core::wire::host::Host;
use miniinfer_core::wire::stats::{pack_stats, unpack_stats};
use miniinfer_core::wire::step::{pack_step, unpack_step};
use miniinfer_core::wire::{WireError, client_ids, frame};
use miniinfer_core::{Command, EngineConfig};
use proptest::prelude::*;

const VOCAB: u32 = 64;
const EOS: u32 = 63;

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_blocks: 64,
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_model_len: 96,
        ..EngineConfig::default()
    }
}

fn text_model() -> Arc<TextModel> {
    let tokens: Vec<String> = (0..VOCAB).map(text).collect();
    TextModel::from_parts(&tokens, &[]).expect("a plain vocabulary")
}

fn unpack(kind: u8, bytes: &[u8], client: u16) -> Result<Vec<Command>, WireError> {
    let grammars = GrammarCompiler::new(text_model(), VOCAB, vec![EOS]);
    unpack_message(kind, bytes, client, &|spec| {
        Ok(grammars.compile(spec).map_err(SubmitError::from)?)
    })
}

fn ask(prompt: Vec<u32>, max_tokens: u32) -> NewRequest {
    NewRequest {
        prompt,
        sampling: SamplingSpec {
            max_tokens: Some(max_tokens),
            ..SamplingSpec::default()
        },
        n: 1,
        ..NewRequest::default()
    }
}

/// What a token says: some of them can spell JSON.
fn text(token: u32) -> String {
    match token {
        61 => "{}".into(),
        62 => "7".into(),
        _ => format!("<{token}>"),
    }
}

fn text_of(tokens: impl Iterator<Item = u32>) -> String {
    tokens.map(text).collect()
}

#[derive(Default)]
struct Received {
    text: String,
    finish: Option<FinishReason>,
    error: Option<String>,
}

/// An engine, its clients, and what carries bytes between them.
struct World {
    host: Host,
    arrays: OwnedArrays,
    model: ShadowModel,
    clients: Vec<Client>,
    received: HashMap<u64, Received>,
}

impl World {
    fn new(clients: u16, policy: StallPolicy) -> Self {
        Self::with_eos(clients, policy, &[])
    }

    fn with_eos(clients: u16, policy: StallPolicy, eos: &[u32]) -> Self {
        let model = text_model();
        let host = Host::new(config(), eos.to_vec(), VOCAB, model.clone()).expect("valid");
        let clients = (0..clients).map(|client| {
            host.connect(client);
            let spec = ClientSpec {
                config: config(),
                vocab_size: VOCAB,
                model: model.clone(),
                eos: eos.to_vec(),
                client,
                policy,
            };
            Client::new(spec).expect("a descriptor")
        });
        Self {
            clients: clients.collect(),
            host,
            arrays: OwnedArrays::new(&config()),
            model: ShadowModel::new(&config(), VOCAB),
            received: HashMap::new(),
        }
    }

    /// Messages to the engine, a step, frames back, deltas read. False if there was nothing to compute.
    fn step(&mut self) -> bool {
        for (client, end) in (0..).zip(&self.clients) {
            for (kind, bytes) in end.take_messages() {
                self.host.feed(client, kind, &bytes).expect("our own");
            }
        }
        let view = self.arrays.view();
        let worked = self.host.driver().plan(0, &view).expect("plan") > 0;
        if worked {
            self.model.forward(&view, &[]);
            self.host.driver().commit(0, &view).expect("commit");
        }
        for (client, bytes) in self.host.take_frames(!worked) {
            self.clients[usize::from(client)]
                .feed(&bytes)
                .expect("our own");
        }
        for client in &self.clients {
            client.turn();
            client.drain(|id, delta| receive(&mut self.received, id, delta));
        }
        worked
    }

    fn run(&mut self) {
        for _ in 0..3 {
            while self.step() {}
        }
    }

    fn check_idle(&self) {
        self.host.driver().check().expect("consistent");
        let stats = self.host.driver().stats();
        assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
        assert_eq!(stats.blocks_used, 0);
        for client in &self.clients {
            assert_eq!(client.stats(), stats, "the counters came through");
        }
    }
}

fn receive(received: &mut HashMap<u64, Received>, id: u64, delta: &mut StreamDelta) {
    let entry = received.entry(id).or_default();
    assert!(entry.finish.is_none(), "a delta after the end");
    entry.text.push_str(&delta.text.text);
    if let Some(finish) = &delta.text.finish {
        entry.finish = Some(finish.reason);
        entry.error.clone_from(&finish.error);
    }
}

#[test]
fn several_clients_get_what_they_would_get_from_an_engine_beside_them() {
    let mut world = World::new(3, StallPolicy::default());
    let mut submissions = Vec::new();
    for round in 0..8_u32 {
        for client in 0..3_u32 {
            let prompt: Vec<u32> = (0..3 + 2 * round)
                .map(|i| (i * 7 + client) % VOCAB)
                .collect();
            let submission = world.clients[client as usize]
                .frontend()
                .submit(ask(prompt.clone(), 20), StreamSpec::default())
                .expect("valid");
            submissions.push((submission, prompt));
        }
        world.step();
    }
    world.run();
    for (submission, prompt) in &submissions {
        let (id, _) = submission.ids();
        let received = &world.received[&id];
        assert_eq!(received.text, text_of(continuation(prompt, VOCAB).take(20)));
        assert_eq!(received.finish, Some(FinishReason::Length));
    }
    world.check_idle();
}

#[test]
fn a_stop_string_a_cancel_and_a_reset_reach_the_engine() {
    let mut world = World::new(1, StallPolicy::default());
    let prompt = vec![1, 2, 3];
    let tokens: Vec<u32> = continuation(&prompt, VOCAB).take(90).collect();
    let spec = StreamSpec {
        stop: vec![format!("<{}>", tokens[4])],
        ..StreamSpec::default()
    };
    let frontend = world.clients[0].frontend();
    let stopped = frontend
        .submit(ask(prompt.clone(), 80), spec)
        .expect("valid");
    let cancelled = frontend
        .submit(ask(prompt, 80), StreamSpec::default())
        .expect("valid");
    let first = tokens.iter().position(|token| *token == tokens[4]);
    for _ in 0..12 {
        world.step();
    }
    cancelled.cancel();
    world.run();
    let received = &world.received[&stopped.ids().0];
    let before = first.expect("it is there");
    assert_eq!(received.text, text_of(tokens[..before].iter().copied()));
    assert_eq!(received.finish, Some(FinishReason::Stop));
    let received = &world.received[&cancelled.ids().0];
    assert_eq!(received.finish, Some(FinishReason::Abort));
    assert!(world.host.driver().stats().counters.generation_tokens < 30);
    assert!(world.host.driver().stats().blocks_cached > 0);
    let reset = pack_commands([Command::ResetPrefixCache], 0);
    assert_eq!(reset, [(RESET, Vec::new())]);
    world.host.feed(0, RESET, &[]).expect("our own");
    world.run();
    assert_eq!(world.host.driver().stats().blocks_cached, 0);
    world.check_idle();
}

#[test]
fn a_client_that_goes_takes_its_requests_along_and_no_others() {
    let mut world = World::new(2, StallPolicy::default());
    let mut submissions = Vec::new();
    for at in 0..20_usize {
        let frontend = world.clients[at % 2].frontend();
        let request = ask(vec![1, at as u32 % VOCAB], 60);
        let submission = frontend.submit(request, StreamSpec::default());
        submissions.push(submission.expect("valid"));
    }
    for _ in 0..10 {
        world.step();
    }
    world.host.disconnect(1);
    world.host.disconnect(1);
    let gone = world.clients.pop().expect("two");
    world.run();
    let finish = |submission: &Submission| world.received.get(&submission.ids().0)?.finish;
    let ended: Vec<bool> = submissions
        .iter()
        .map(|each| finish(each).is_some())
        .collect();
    assert_eq!(ended, [true, false].repeat(10));
    // Its number is not served any more.
    let late = gone
        .frontend()
        .submit(ask(vec![1], 1), StreamSpec::default());
    drop(late.expect("it does not know yet"));
    let (kind, bytes) = &gone.take_messages()[0];
    assert_eq!(*kind, ADD);
    assert!(world.host.feed(1, *kind, bytes).is_err());
    world.check_idle();
}

#[test]
fn a_storm_of_cancels_leaves_nothing() {
    let mut world = World::new(2, StallPolicy::default());
    for round in 0..40_usize {
        let frontend = world.clients[round % 2].frontend();
        let all: Vec<_> = (0..25)
            .map(|at| {
                let request = ask(vec![at % VOCAB, round as u32], 50);
                frontend
                    .submit(request, StreamSpec::default())
                    .expect("valid")
            })
            .collect();
        if round % 3 == 0 {
            world.step();
        }
        for (at, submission) in all.into_iter().enumerate() {
            match at % 3 {
                0 => drop(submission),
                1 => submission.cancel(),
                _ => submission.close(),
            }
        }
        world.step();
    }
    world.run();
    world.check_idle();
}

#[test]
fn an_engine_that_is_lost_ends_every_stream_and_another_takes_its_place() {
    let mut world = World::new(1, StallPolicy::default());
    let frontend = world.clients[0].frontend();
    let lost: Vec<_> = (0..20)
        .map(|at| frontend.submit(ask(vec![at], 50), StreamSpec::default()))
        .collect();
    for _ in 0..5 {
        world.step();
    }
    // One that the engine has not heard of.
    let unheard = world.clients[0]
        .frontend()
        .submit(ask(vec![9], 50), StreamSpec::default());
    world.clients[0].fail("killed by signal 9");
    world.clients[0].drain(|id, delta| receive(&mut world.received, id, delta));
    for submission in lost.iter().chain([&unheard]) {
        let (id, _) = submission.as_ref().expect("valid").ids();
        let received = &world.received[&id];
        assert_eq!(received.finish, Some(FinishReason::Error));
        assert_eq!(received.error.as_deref(), Some("killed by signal 9"));
    }
    let refused = world.clients[0]
        .frontend()
        .submit(ask(vec![1], 1), StreamSpec::default());
    let message = refused.err().expect("nobody would compute it").to_string();
    assert!(message.contains("killed by signal 9"), "{message}");

    world.host = Host::new(config(), Vec::new(), VOCAB, text_model()).expect("valid");
    world.model = ShadowModel::new(&config(), VOCAB);
    world.host.connect(0);
    world.clients[0].reopen();
    drop((lost, unheard));
    let again = world.clients[0]
        .frontend()
        .submit(ask(vec![5, 6], 12), StreamSpec::default())
        .expect("there is an engine again");
    world.run();
    let text = &world.received[&again.ids().0].text;
    assert_eq!(*text, text_of(continuation(&[5, 6], VOCAB).take(12)));
    world.check_idle();
}

#[test]
fn a_reader_that_does_not_read_pauses_its_request_and_loses_patience_in_the_end() {
    let policy = StallPolicy {
        max_backlog: 5,
        stall_limit: std::time::Duration::from_millis(20),
    };
    let mut world = World::new(1, policy);
    let frontend = world.clients[0].frontend();
    let held = frontend
        .submit(ask(vec![1, 2], 90), StreamSpec::default())
        .expect("valid");
    held.hold();
    while world.clients[0].turn().is_none() {
        world.step();
    }
    world.run();
    assert_eq!(world.host.driver().stats().num_paused, 1);
    let patience = world.clients[0].turn().expect("it is limited");
    assert!(patience <= policy.stall_limit);
    std::thread::sleep(2 * policy.stall_limit);
    world.clients[0].turn();
    world.run();
    held.resume();
    world.run();
    let received = &world.received[&held.ids().0];
    assert_eq!(received.finish, Some(FinishReason::Abort));
    world.check_idle();
}

#[test]
fn a_host_refuses_what_a_client_should_have() {
    let host = Host::new(config(), Vec::new(), VOCAB, text_model()).expect("valid");
    host.connect(3);
    let add = |first: u64, request: NewRequest| {
        let command = Command::Add {
            first: client_ids(3).start + first,
            request: Box::new(request),
            arrival: Arrival::default(),
        };
        let (kind, bytes) = pack_commands([command], 3).remove(0);
        host.feed(3, kind, &bytes)
    };
    add(5, ask(vec![1], 4)).expect("fine");
    for (request, named) in [
        (ask(vec![VOCAB], 4), "64"),
        (ask(vec![1; 96], 4), "96"),
        (ask(vec![], 4), "empty"),
    ] {
        let message = add(9, request).expect_err("refused").to_string();
        assert!(message.contains(named), "{message}");
    }
    assert!(add(5, ask(vec![1], 4)).is_err(), "an id twice");
    add(6, ask(vec![1], 4)).expect("the next one");
}

fn entries() -> impl Strategy<Value = StepOutput> {
    let end = prop_oneof![
        Just(None),
        any::<u32>().prop_map(|token| Some(EndReason::Eos(token))),
        any::<u32>().prop_map(|token| Some(EndReason::StopToken(token))),
        Just(Some(EndReason::Length)),
        Just(Some(EndReason::Abort)),
        "\\PC{0,40}".prop_map(|text| Some(EndReason::Error(text.into()))),
    ];
    let entry = (0..3_u16, 0..1_u64 << 48, 1..4_u32, any::<u32>(), end);
    let all = (
        prop::collection::vec(entry, 0..20),
        0..4_usize,
        any::<bool>(),
    );
    all.prop_map(|(rows, top_width, with_logprobs)| {
        let mut output = StepOutput {
            top_width,
            ..StepOutput::default()
        };
        for (client, offset, num_tokens, cached_tokens, end) in rows {
            output.entries.push(OutputEntry {
                id: client_ids(client).start + offset,
                num_tokens,
                num_logprobs: with_logprobs.then_some(top_width as u32),
                cached_tokens,
                end,
            });
            for _ in 0..num_tokens {
                let value = output.tokens.len() as u32;
                output.tokens.push(value.wrapping_mul(0x9e37_79b9));
                if with_logprobs {
                    output.logprobs.push(-0.5 * value as f32);
                    output.ranks.push(value);
                    output
                        .top_ids
                        .extend((0..top_width as u32).map(|i| value + i));
                    let tops = (0..top_width).map(|i| -(i as f32) - value as f32);
                    output.top_logprobs.extend(tops);
                }
            }
        }
        output
    })
}

/// What of an output is a client's, found in the plainest way.
fn share(output: &StepOutput, client: u16) -> StepOutput {
    let mut share = StepOutput {
        top_width: output.top_width,
        ..StepOutput::default()
    };
    let mut at = 0;
    for entry in &output.entries {
        let next = at + entry.num_tokens as usize;
        if client_ids(client).contains(&entry.id) {
            share.entries.push(entry.clone());
            for row in at..next {
                share.tokens.push(output.tokens[row]);
                if !output.logprobs.is_empty() {
                    share.logprobs.push(output.logprobs[row]);
                    share.ranks.push(output.ranks[row]);
                    let top = row * output.top_width..(row + 1) * output.top_width;
                    share.top_ids.extend(&output.top_ids[top.clone()]);
                    share.top_logprobs.extend(&output.top_logprobs[top]);
                }
            }
        }
        at = next;
    }
    share
}

fn request() -> impl Strategy<Value = NewRequest> {
    let numbers = (any::<u32>(), any::<u64>(), any::<i32>(), 1..9_u32);
    let lists = (
        prop::collection::vec(any::<u32>(), 0..300),
        prop::collection::vec(any::<u32>(), 0..5),
        prop::collection::vec((any::<u32>(), -100.0..100.0_f32), 0..5),
        prop::collection::vec("\\PC{0,300}", 0..3),
    );
    let options = (any::<Option<u32>>(), any::<Option<u32>>(), any::<bool>());
    (numbers, lists, options, 0.0..2.0_f32).prop_map(
        |((small, seed, priority, n), (prompt, stops, bias, texts), options, float)| NewRequest {
            prompt,
            sampling: SamplingSpec {
                temperature: float,
                top_k: small,
                top_p: float / 2.0,
                min_p: float / 3.0,
                seed,
                num_logprobs: options.0,
                min_tokens: small / 2,
                ignore_eos: options.2,
                stop_token_ids: stops,
                presence_penalty: -float,
                frequency_penalty: float,
                repetition_penalty: 1.0 + float,
                max_tokens: options.1,
                logit_bias: bias,
            },
            limits: TokenLimits {
                grammar: None,
                grammar_after: vec![small],
                allowed_token_ids: options.0.map(|id| vec![id, small]),
                bad_words: BadWords::new([vec![small, 3], vec![5]]),
            },
            num_prompt_logprobs: options.1,
            n,
            priority,
            tenant: texts.concat().into(),
            extra_keys: texts
                .into_iter()
                .enumerate()
                .map(|(at, text)| {
                    if at % 2 == 0 {
                        ExtraKey::Salt(text)
                    } else {
                        ExtraKey::Adapter(text)
                    }
                })
                .collect(),
        },
    )
}

proptest! {
    #[test]
    fn each_client_gets_its_share_of_a_step(output in entries()) {
        for client in 0..3 {
            let mut bytes = Vec::new();
            let expected = share(&output, client);
            prop_assert_eq!(pack_step(&output, client, &mut bytes), !expected.is_empty());
            if !expected.is_empty() {
                let mut read = StepOutput::default();
                unpack_step(&bytes, client, &mut read).expect("our own");
                prop_assert_eq!(&read, &expected);
                for cut in 0..bytes.len() {
                    let mut part = StepOutput::default();
                    prop_assert!(unpack_step(&bytes[..cut], client, &mut part).is_err());
                }
                bytes.push(0);
                prop_assert!(unpack_step(&bytes, client, &mut StepOutput::default()).is_err());
            }
        }
    }

    #[test]
    fn a_request_comes_through_whole(request in request(), first in 0..1_u64 << 40) {
        let first = client_ids(7).start + first;
        let command = Command::Add {
            first,
            request: Box::new(request.clone()),
            arrival: Arrival::default(),
        };
        let (kind, bytes) = pack_commands([command], 7).remove(0);
        let read = unpack(kind, &bytes, 7).expect("our own").remove(0);
        let Command::Add { first: id, request: read, arrival } = read else {
            panic!("another command");
        };
        prop_assert_eq!(id, first);
        prop_assert_eq!(format!("{read:?}"), format!("{request:?}"));
        prop_assert!(arrival.time.elapsed().as_secs() < 60);
        for cut in 0..bytes.len() {
            prop_assert!(unpack(kind, &bytes[..cut], 7).is_err());
        }
    }

    #[test]
    fn ids_keep_their_order(kinds in prop::collection::vec((0..5_u8, 0..1_u64 << 48), 0..50)) {
        let make = |(kind, id): (u8, u64)| {
            let id = client_ids(2).start + id;
            match kind {
                0 => Command::Cancel(id),
                1 => Command::Stop(id),
                2 => Command::Pause(id),
                3 => Command::Resume(id),
                _ => Command::ResetPrefixCache,
            }
        };
        let sent: Vec<_> = kinds.iter().copied().map(make).collect();
        let messages = pack_commands(kinds.iter().copied().map(make), 2);
        let read = messages.iter().flat_map(|(kind, bytes)| {
            unpack(*kind, bytes, 2).expect("our own")
        });
        let read: Vec<_> = read.collect();
        prop_assert_eq!(format!("{read:?}"), format!("{sent:?}"));
    }

    #[test]
    fn counters_come_through(numbers in prop::collection::vec(any::<u64>(), 8), sum in 0.0..1e9_f64) {
        let mut stats = Stats::default();
        stats.counters.steps = numbers[0];
        stats.counters.accepted_tokens = numbers[1];
        stats.counters.drafts = numbers[6];
        stats.num_paused = numbers[2] as u32 as usize;
        stats.num_deferred = numbers[7] as u32 as usize;
        stats.blocks_total = numbers[3] as u32;
        stats.prefix_evictions = numbers[4];
        stats.counters.time_to_first_token.sum = sum;
        stats.counters.request_decode_time.counts[21] = numbers[5];
        let mut bytes = Vec::new();
        pack_stats(&stats, &mut bytes);
        prop_assert_eq!(unpack_stats(&bytes).expect("our own"), stats);
    }

    #[test]
    fn noise_is_refused_and_breaks_nothing(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        kind in any::<u8>(),
        flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        output in entries(),
        request in request(),
    ) {
        let mut world = World::new(1, StallPolicy::default());
        let _ = world.clients[0].feed(&bytes);
        let _ = world.host.feed(0, kind, &bytes);
        // Closer to the truth: whole messages with a few bytes changed.
        bytes = vec![frame::STEP];
        if pack_step(&output, 0, &mut bytes) {
            flip(&mut bytes, &flips);
            let _ = world.clients[0].feed(&bytes);
        }
        let first = client_ids(0).start + 1;
        let (request, arrival) = (Box::new(request), Arrival::default());
        let command = Command::Add { first, request, arrival };
        let (kind, mut bytes) = pack_commands([command], 0).remove(0);
        flip(&mut bytes, &flips);
        let _ = world.host.feed(0, kind, &bytes);
        let sound = world.clients[0].frontend().submit(ask(vec![3], 5), StreamSpec::default());
        let sound = sound.expect("valid");
        world.clients[0].turn();
        let [(_, bytes)] = <[_; 1]>::try_from(world.clients[0].take_messages()).expect("one");
        prop_assert!(unpack(ADD, &bytes, 0).is_ok());
        drop(sound);
        world.host.disconnect(0);
        world.host.connect(0);
        world.run();
        world.host.driver().check().expect("consistent");
    }
}

fn flip(bytes: &mut [u8], flips: &[(usize, u8)]) {
    for (at, value) in flips {
        let at = at % bytes.len();
        bytes[at] = *value;
    }
}

#[test]
fn a_grammar_goes_as_its_text_and_a_bad_one_is_refused() {
    let world = World::with_eos(1, StallPolicy::default(), &[EOS]);
    let frontend = world.clients[0].frontend();
    for source in [
        GrammarSource::JsonObject,
        GrammarSource::JsonSchema(r#"{"type": "integer"}"#.into()),
        GrammarSource::Regex("<[0-9]>+".into()),
        GrammarSource::Choice(vec!["<1>".into(), "<2><3>".into()]),
        GrammarSource::Lark("start: \"<1>\"".into()),
    ] {
        for whitespace in [
            Whitespace::Bounded,
            Whitespace::Compact,
            Whitespace::Pattern(" ?".into()),
        ] {
            let source = source.clone();
            let spec = GrammarSpec { source, whitespace };
            let mut request = ask(vec![1], 4);
            request.limits.grammar = Some(frontend.compile_grammar(&spec).expect("a grammar"));
            let kept = frontend
                .submit(request, StreamSpec::default())
                .expect("valid");
            let (kind, mut bytes) = world.clients[0].take_messages().remove(0);
            let command = unpack(kind, &bytes, 0).expect("our own").remove(0);
            let Command::Add { request, .. } = command else {
                panic!("another command");
            };
            assert_eq!(*request.limits.grammar.expect("it came").spec(), spec);
            world.host.feed(0, kind, &bytes).expect("our own");
            if let Some(at) = bytes.windows(6).position(|text| text == b"[0-9]>") {
                bytes[at + 4] = b'(';
                assert!(matches!(
                    unpack(kind, &bytes, 0),
                    Err(WireError::Request(_))
                ));
            }
            drop(kept);
            world.clients[0].take_messages();
        }
    }
}

#[test]
fn a_list_that_claims_to_be_long_reserves_nothing() {
    // A step that says that four thousand million entries follow.
    let bytes = [frame::STEP, 0x97, 0xdd, 0xff, 0xff, 0xff, 0xff];
    let world = World::new(1, StallPolicy::default());
    let message = world.clients[0].feed(&bytes).expect_err("cut").to_string();
    assert!(message.contains("ends at byte 6"), "{message}");
    let refused = world
        .host
        .feed(0, 77, &[])
        .expect_err("unknown")
        .to_string();
    assert!(refused.contains("77"), "{refused}");
    assert!(world.clients[0].feed(&[]).is_err());
}
