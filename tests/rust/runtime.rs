//! The whole control plane under threads: submitters, cancellers, an engine, a text thread, a reader.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use miniinfer_core::EngineConfig;
use miniinfer_core::arrays::OwnedArrays;
use miniinfer_core::frontend::Submission;
use miniinfer_core::pipeline::StreamDelta;
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::runtime::{Runtime, RuntimeSpec};
use miniinfer_core::sim::{ShadowModel, continuation};
use miniinfer_core::stall::StallPolicy;
use miniinfer_core::text::{FinishReason, StreamSpec, TextModel};

const VOCAB: u32 = 64;

fn runtime(config: EngineConfig, text_thread: bool, policy: StallPolicy) -> Runtime {
    let tokens: Vec<String> = (0..VOCAB).map(|id| format!("<{id}>")).collect();
    let model = TextModel::from_parts(&tokens, &[]).expect("a plain vocabulary");
    let eos = Vec::new();
    let spec = RuntimeSpec {
        config,
        eos,
        vocab_size: VOCAB,
        model,
        text_thread,
        policy,
    };
    Runtime::new(spec).expect("a valid configuration")
}

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

fn ask(prompt: Vec<u32>, max_tokens: u32) -> NewRequest {
    let sampling = SamplingSpec {
        max_tokens: Some(max_tokens),
        ..SamplingSpec::default()
    };
    NewRequest {
        prompt,
        sampling,
        n: 1,
        ..NewRequest::default()
    }
}

fn text_of(tokens: impl Iterator<Item = u32>) -> String {
    let mut text = String::new();
    for token in tokens {
        write!(text, "<{token}>").expect("a String takes everything");
    }
    text
}

/// One step; true if there was something to compute.
fn step(runtime: &Runtime, arrays: &mut OwnedArrays, model: &mut ShadowModel) -> bool {
    let view = arrays.view();
    if runtime.driver().plan(0, &view).expect("plan") == 0 {
        return false;
    }
    model.forward(&view, &[]);
    runtime.driver().commit(0, &view).expect("commit");
    true
}

#[derive(Default)]
struct Received {
    text: String,
    finish: Option<FinishReason>,
}

fn receive(received: &mut HashMap<u64, Received>, id: u64, delta: &mut StreamDelta) {
    let entry = received.entry(id).or_default();
    assert!(entry.finish.is_none(), "a delta after the end");
    entry.text.push_str(&delta.text.text);
    entry.finish = delta.text.finish.as_ref().map(|finish| finish.reason);
}

#[test]
fn inline_text_is_there_when_the_step_is_done() {
    let runtime = runtime(config(), false, StallPolicy::default());
    let (mut arrays, mut model) = (
        OwnedArrays::new(&config()),
        ShadowModel::new(&config(), VOCAB),
    );
    let prompt = vec![1, 2, 3];
    let submission = runtime
        .frontend()
        .submit(ask(prompt.clone(), 20), StreamSpec::default())
        .expect("valid");
    let mut received = HashMap::new();
    let mut steps = 0;
    while runtime.has_requests() {
        step(&runtime, &mut arrays, &mut model);
        steps += 1;
        let mut deltas = 0;
        runtime.drain(|id, delta| {
            deltas += 1;
            receive(&mut received, id, delta);
        });
        assert_eq!(deltas, 1, "one delta a step");
    }
    assert_eq!(steps, 20);
    let (id, _) = submission.ids();
    assert_eq!(
        received[&id].text,
        text_of(continuation(&prompt, VOCAB).take(20))
    );
    assert_eq!(received[&id].finish, Some(FinishReason::Length));
}

#[test]
fn a_stop_string_ends_the_request_and_the_surplus_token_is_not_delivered() {
    let runtime = runtime(config(), false, StallPolicy::default());
    let (mut arrays, mut model) = (
        OwnedArrays::new(&config()),
        ShadowModel::new(&config(), VOCAB),
    );
    let prompt = vec![5, 6];
    let tokens: Vec<u32> = continuation(&prompt, VOCAB).take(10).collect();
    // The end of one token and the start of the next.
    let stop = format!("{}><", tokens[3]);
    let spec = StreamSpec {
        stop: vec![stop.clone()],
        ..StreamSpec::default()
    };
    let submission = runtime
        .frontend()
        .submit(ask(prompt, 60), spec)
        .expect("valid");
    let mut received = HashMap::new();
    let mut counted = 0;
    for _ in 0..12 {
        step(&runtime, &mut arrays, &mut model);
        runtime.drain(|id, delta| {
            counted = delta.text.num_output_tokens;
            receive(&mut received, id, delta);
        });
    }
    let whole = text_of(tokens.iter().copied());
    let expected = &whole[..whole.find(&stop).expect("the stop string is in the text")];
    let (id, _) = submission.ids();
    assert_eq!(received[&id].text, expected);
    assert_eq!(received[&id].finish, Some(FinishReason::Stop));
    assert!(!runtime.has_requests());
    assert_eq!(
        counted,
        tokens.iter().position(|t| *t == tokens[3]).expect("there") as u32 + 2
    );
    runtime.driver().check().expect("consistent");
}

#[test]
fn a_reader_that_does_not_read_is_paused_then_cancelled_and_another_is_not_slowed() {
    let policy = StallPolicy {
        max_backlog: 8,
        stall_limit: Duration::from_millis(50),
    };
    let runtime = runtime(config(), false, policy);
    let (mut arrays, mut model) = (
        OwnedArrays::new(&config()),
        ShadowModel::new(&config(), VOCAB),
    );
    let slow = runtime
        .frontend()
        .submit(ask(vec![1], 90), StreamSpec::default())
        .expect("valid");
    let quick = runtime
        .frontend()
        .submit(ask(vec![2], 60), StreamSpec::default())
        .expect("valid");
    slow.hold();
    let mut received = HashMap::new();
    for _ in 0..60 {
        assert!(step(&runtime, &mut arrays, &mut model));
        runtime.drain(|id, delta| receive(&mut received, id, delta));
    }
    assert_eq!(received[&quick.ids().0].finish, Some(FinishReason::Length));
    assert_eq!(runtime.stall_counters().paused.load(Ordering::Relaxed), 1);
    assert!(
        !step(&runtime, &mut arrays, &mut model),
        "a paused request is not scheduled"
    );
    std::thread::sleep(Duration::from_millis(60));
    step(&runtime, &mut arrays, &mut model);
    step(&runtime, &mut arrays, &mut model);
    assert!(!runtime.has_requests());
    slow.resume();
    runtime.drain(|id, delta| receive(&mut received, id, delta));
    let slow = &received[&slow.ids().0];
    assert_eq!(slow.finish, Some(FinishReason::Abort));
    // Nothing of what was generated before the pause is lost.
    let whole = text_of(continuation(&[1], VOCAB).take(90));
    assert!(whole.starts_with(&slow.text) && slow.text.len() > 3 * 16);
}

#[test]
fn a_paused_reader_that_returns_gets_everything() {
    let policy = StallPolicy {
        max_backlog: 8,
        stall_limit: Duration::from_secs(60),
    };
    let runtime = runtime(config(), false, policy);
    let (mut arrays, mut model) = (
        OwnedArrays::new(&config()),
        ShadowModel::new(&config(), VOCAB),
    );
    let slow = runtime
        .frontend()
        .submit(ask(vec![1], 90), StreamSpec::default())
        .expect("valid");
    slow.hold();
    while step(&runtime, &mut arrays, &mut model) {
        runtime.drain(|_, _| panic!("held"));
    }
    let mut received = HashMap::new();
    slow.resume();
    while runtime.has_requests() {
        runtime.drain(|id, delta| receive(&mut received, id, delta));
        step(&runtime, &mut arrays, &mut model);
    }
    runtime.drain(|id, delta| receive(&mut received, id, delta));
    let got = &received[&slow.ids().0];
    assert_eq!(got.text, text_of(continuation(&[1], VOCAB).take(90)));
    assert_eq!(got.finish, Some(FinishReason::Length));
}

#[test]
fn a_failed_engine_tells_every_reader_and_refuses_new_requests() {
    let runtime = runtime(config(), true, StallPolicy::default());
    let (mut arrays, mut model) = (
        OwnedArrays::new(&config()),
        ShadowModel::new(&config(), VOCAB),
    );
    let submissions: Vec<Submission> = (0..40)
        .map(|i| {
            runtime
                .frontend()
                .submit(ask(vec![i], 50), StreamSpec::default())
                .expect("valid")
        })
        .collect();
    step(&runtime, &mut arrays, &mut model);
    runtime.driver().fail("the device is on fire");
    let error = runtime
        .frontend()
        .submit(ask(vec![1], 5), StreamSpec::default())
        .err();
    assert!(error.expect("refused").to_string().contains("on fire"));
    let mut ended = HashSet::new();
    while ended.len() < submissions.len() {
        runtime
            .wake()
            .wait(Some(Duration::from_secs(20)))
            .expect("wait");
        runtime.wake().clear();
        runtime.drain(|id, delta| {
            if let Some(finish) = delta.text.finish.take() {
                assert_eq!(finish.reason, FinishReason::Error);
                assert!(finish.error.is_some_and(|error| error.contains("on fire")));
                ended.insert(id);
            }
        });
    }
    runtime.driver().check().expect("consistent");
}

/// 8 submitters, 8 cancellers, drops at any moment. Each request that is left alone gets its text whole;
/// what was cancelled got a prefix of it; nothing is left behind.
#[test]
#[expect(clippy::too_many_lines, reason = "one story of five kinds of threads")]
fn storm_of_submits_and_cancels() {
    const EACH: usize = 150;
    let runtime = Arc::new(runtime(config(), true, StallPolicy::default()));
    let live: Arc<Mutex<Vec<(Submission, bool)>>> = Arc::default();
    let expected: Arc<Mutex<HashMap<u64, (String, bool)>>> = Arc::default();
    let submitting = Arc::new(AtomicU64::new(8));
    let stop = Arc::new(AtomicBool::new(false));

    let mut threads = Vec::new();
    for thread in 0..8u32 {
        let (runtime, live, expected) = (runtime.clone(), live.clone(), expected.clone());
        let submitting = submitting.clone();
        threads.push(std::thread::spawn(move || {
            for i in 0..EACH as u32 {
                let prompt: Vec<u32> = (0..=i % 40).map(|p| (p + thread) % VOCAB).collect();
                let max_tokens = 1 + (i * 7) % 50;
                let leave = i % 3 != 0;
                let tokens = continuation(&prompt, VOCAB).take(max_tokens as usize);
                let text = text_of(tokens);
                let request = ask(prompt, max_tokens);
                let submission = runtime
                    .frontend()
                    .submit(request, StreamSpec::default())
                    .expect("valid");
                expected
                    .lock()
                    .expect("lock")
                    .insert(submission.ids().0, (text, leave));
                live.lock().expect("lock").push((submission, leave));
                if i % 16 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            submitting.fetch_sub(1, Ordering::Release);
        }));
    }
    let kept: Arc<Mutex<Vec<Submission>>> = Arc::default();
    for _ in 0..8 {
        let (live, kept, submitting) = (live.clone(), kept.clone(), submitting.clone());
        threads.push(std::thread::spawn(move || {
            loop {
                let next = live.lock().expect("lock").pop();
                match next {
                    Some((submission, true)) => kept.lock().expect("lock").push(submission),
                    // Cancelled politely, or dropped.
                    Some((submission, false)) => {
                        if submission.ids().0 % 2 == 0 {
                            submission.cancel();
                            submission.cancel();
                            kept.lock().expect("lock").push(submission);
                        }
                    }
                    None if submitting.load(Ordering::Acquire) == 0 => return,
                    None => std::thread::yield_now(),
                }
            }
        }));
    }
    let engine = {
        let (runtime, stop) = (runtime.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut arrays = OwnedArrays::new(&config());
            let mut model = ShadowModel::new(&config(), VOCAB);
            while !stop.load(Ordering::Acquire) {
                if !step(&runtime, &mut arrays, &mut model) {
                    runtime.driver().wait(None);
                }
            }
        })
    };
    let mut received: HashMap<u64, Received> = HashMap::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    loop {
        if runtime
            .wake()
            .wait(Some(Duration::from_millis(20)))
            .expect("wait")
        {
            runtime.wake().clear();
        }
        runtime.drain(|id, delta| receive(&mut received, id, delta));
        let done = submitting.load(Ordering::Acquire) == 0
            && live.lock().expect("lock").is_empty()
            && !runtime.has_requests();
        let all_ended = || {
            let kept = kept.lock().expect("lock");
            kept.iter()
                .all(|s| received.get(&s.ids().0).is_some_and(|r| r.finish.is_some()))
        };
        if done && all_ended() {
            break;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "some request never ended"
        );
    }
    stop.store(true, Ordering::Release);
    runtime.driver().interrupt();
    for thread in threads {
        thread.join().expect("no panic");
    }
    engine.join().expect("no panic");

    runtime.driver().check().expect("consistent");
    let stats = runtime.driver().stats();
    assert_eq!(stats.counters.requests, 8 * EACH as u64);
    let expected = expected.lock().expect("lock");
    for (id, (text, left_alone)) in expected.iter() {
        match received.get(id) {
            Some(got) if *left_alone => {
                assert_eq!(&got.text, text);
                assert_eq!(got.finish, Some(FinishReason::Length));
            }
            Some(got) => assert!(text.starts_with(&got.text)),
            None => assert!(!left_alone, "a request that was left alone got nothing"),
        }
    }
    drop(kept);
    runtime.driver().check().expect("consistent");
}

/// A reader with a deadline for the first token must hear of it, even if it wants one delta at the end.
#[test]
fn the_first_token_is_told_even_if_its_text_is_held_back() {
    let runtime = runtime(config(), false, StallPolicy::default());
    let mut arrays = OwnedArrays::new(&config());
    let mut model = ShadowModel::new(&config(), VOCAB);
    let spec = StreamSpec {
        final_only: true,
        ..StreamSpec::default()
    };
    let submission = runtime.frontend().submit(ask(vec![1, 2, 3], 3), spec);
    let submission = submission.expect("it fits");
    let mut told = Vec::new();
    while step(&runtime, &mut arrays, &mut model) {
        runtime.drain(|id, delta| {
            assert_eq!(id, submission.ids().0);
            told.push((delta.text.token_ids.len(), delta.text.finish.is_some()));
        });
    }
    assert_eq!(told, [(0, false), (3, true)]);
}
