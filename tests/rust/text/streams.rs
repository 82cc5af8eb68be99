//! A stream as a whole: text, ids and log-probabilities together, however it is read.

use std::sync::LazyLock;

use miniinfer_core::text::{
    Delta, Detokenizer, Finish, FinishReason, LogprobInput, StopCause, StreamSpec, TextStream,
    TokenInput, Verdict,
};
use proptest::prelude::*;

use crate::vocabularies::{self, Pair};

static BYTE_LEVEL: LazyLock<Pair> = LazyLock::new(vocabularies::gpt2);
static LLAMA: LazyLock<Pair> = LazyLock::new(vocabularies::llama);

/// Reads a stream whose reader takes what there is after each token for which `cuts` has a set bit.
fn read(pair: &Pair, ids: &[u32], spec: &StreamSpec, cuts: u64) -> Vec<Delta> {
    let mut stream = TextStream::new(pair.model.clone(), spec.clone()).unwrap();
    let (mut taken, mut waiting, mut step) = (Vec::new(), Delta::default(), Delta::default());
    for (at, id) in ids.iter().enumerate() {
        let logprob = LogprobInput {
            logprob: -(at as f32),
            rank: 1,
            top_ids: &[*id, 0],
            top_logprobs: &[-0.5, -1.5],
        };
        let verdict = stream.push(
            &TokenInput {
                id: *id,
                logprob: Some(logprob),
            },
            &mut step,
        );
        waiting.merge_from(&mut step);
        if cuts >> (at % 64) & 1 == 1 {
            taken.push(std::mem::take(&mut waiting));
        }
        if verdict == Verdict::Stopped {
            assert_eq!(
                stream.push(&TokenInput::new(0), &mut step),
                Verdict::Stopped
            );
            break;
        }
    }
    stream.finish(FinishReason::Length, None, &mut step);
    assert!(stream.is_finished());
    waiting.merge_from(&mut step);
    if !waiting.is_empty() {
        taken.push(waiting);
    }
    stream.finish(FinishReason::Abort, None, &mut step);
    assert!(step.is_empty());
    taken
}

fn whole(mut deltas: Vec<Delta>) -> Delta {
    let mut whole = Delta::default();
    for delta in &mut deltas {
        whole.merge_from(delta);
    }
    whole
}

/// Text, number of tokens and stop of a byte-level stream, by a search over the whole text.
fn naive(ids: &[u32], spec: &StreamSpec) -> (String, usize, Option<String>) {
    let mut detokenizer =
        Detokenizer::new(BYTE_LEVEL.model.clone(), spec.skip_special_tokens, false);
    let mut text = String::new();
    let mut ends = Vec::new();
    for id in ids {
        detokenizer.push(*id, &mut text);
        ends.push(text.len());
    }
    detokenizer.finish(&mut text);
    let exempt = match spec.min_tokens as usize {
        0 => 0,
        count => ends.get(count - 1).copied().unwrap_or(text.len()),
    };
    let mut best: Option<(usize, usize, &String)> = None;
    for stop in &spec.stop {
        for (start, _) in text[exempt..].match_indices(stop.as_str()).take(1) {
            let (start, end) = (exempt + start, exempt + start + stop.len());
            if best.is_none_or(|(best_start, best_end, _)| (end, start) < (best_end, best_start)) {
                best = Some((start, end, stop));
            }
        }
    }
    let Some((start, end, stop)) = best else {
        return (text, ids.len(), None);
    };
    let count = ends
        .iter()
        .position(|token_end| *token_end >= end)
        .map_or(ids.len(), |last| last + 1);
    text.truncate(if spec.include_stop { end } else { start });
    (text, count, Some(stop.clone()))
}

fn spec() -> impl Strategy<Value = StreamSpec> {
    let stops = proptest::collection::vec("[abé日😀]{1,3}", 0..3);
    (
        stops,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        0..6u32,
        proptest::option::of(0..3u32),
    )
        .prop_map(
            |(stop, include_stop, final_only, skip_special_tokens, min_tokens, num_logprobs)| {
                StreamSpec {
                    skip_special_tokens,
                    continuation: false,
                    stop,
                    include_stop,
                    min_tokens,
                    final_only,
                    num_logprobs,
                    parse: None,
                }
            },
        )
}

/// Bytes of a short text, so that characters are cut and stop strings happen, with a few other
/// tokens in between.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    (
        "[abé日😀]{0,12}",
        proptest::collection::vec((0..40usize, 250..300u32), 0..3),
    )
        .prop_map(|(text, others)| {
            let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
            for (at, id) in others {
                ids.insert(at.min(ids.len()), id);
            }
            ids
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_is_what_a_search_over_the_whole_gives(ids in ids(), spec in spec(), cuts: u64) {
        let deltas = read(&BYTE_LEVEL, &ids, &spec, cuts);
        for (at, delta) in deltas.iter().enumerate() {
            prop_assert_eq!(delta.finish.is_some(), at + 1 == deltas.len());
            prop_assert!(!spec.final_only || delta.is_empty() || delta.finish.is_some());
            prop_assert!(delta.finish.is_some() || delta.token_ids.is_empty() || !delta.text.is_empty());
        }
        let all = whole(deltas);
        let (text, count, stop) = naive(&ids, &spec);
        prop_assert_eq!(&all.text, &text);
        prop_assert_eq!(&all.token_ids, &ids[..count]);
        prop_assert_eq!(all.num_output_tokens as usize, count);
        let (reason, stop) = stop.map_or((FinishReason::Length, StopCause::None), |stop| (FinishReason::Stop, StopCause::Text(stop)));
        prop_assert_eq!(all.finish, Some(Finish { reason, stop, error: None }));
        let logprobs = spec.num_logprobs.map_or(0, |_| count);
        prop_assert_eq!(all.logprobs.len(), logprobs);
        for (at, logprob) in all.logprobs.iter().enumerate() {
            prop_assert_eq!((logprob.id, logprob.logprob), (ids[at], -(at as f32)));
            prop_assert_eq!(logprob.top.len(), spec.num_logprobs.unwrap().min(2) as usize);
        }
    }

    /// Byte runs come late; what is delivered must not depend on when it is read all the same.
    #[test]
    fn byte_fallback_streams_do_not_depend_on_the_reader(ids in ids(), spec in spec(), cuts: u64) {
        let ids: Vec<u32> = ids.iter().map(|id| if *id < 128 && id % 2 == 0 { LLAMA.id("a") } else { id + 20 }).collect();
        let all = whole(read(&LLAMA, &ids, &spec, cuts));
        let once = whole(read(&LLAMA, &ids, &StreamSpec { final_only: true, ..spec.clone() }, 0));
        prop_assert_eq!(&all, &once);
        prop_assert_eq!(&all.token_ids, &ids[..all.token_ids.len()]);
        if spec.stop.is_empty() {
            prop_assert_eq!(all.text, LLAMA.decode(&ids, spec.skip_special_tokens));
        }
    }
}

#[test]
fn ids_travel_with_the_text_they_made() {
    let ids: Vec<u32> = "a日STOx".bytes().map(u32::from).collect();
    let spec = StreamSpec {
        stop: vec!["STOP".into()],
        ..StreamSpec::default()
    };
    let deltas = read(&BYTE_LEVEL, &ids, &spec, u64::MAX);
    let seen: Vec<(&str, usize)> = deltas
        .iter()
        .map(|delta| (delta.text.as_str(), delta.token_ids.len()))
        .collect();
    assert_eq!(
        seen,
        [
            ("a", 1),
            ("", 0),
            ("", 0),
            ("日", 3),
            ("", 0),
            ("", 0),
            ("", 0),
            ("STOx", 4),
            ("", 0)
        ]
    );
    assert_eq!(deltas[7].num_output_tokens, 8);
}

#[test]
fn a_failed_stream_says_why_and_keeps_its_text() {
    for final_only in [false, true] {
        let spec = StreamSpec {
            final_only,
            stop: vec!["ab".into()],
            ..StreamSpec::default()
        };
        let mut stream = TextStream::new(BYTE_LEVEL.model.clone(), spec).unwrap();
        let mut delta = Delta::default();
        stream.push(&TokenInput::new(u32::from(b'a')), &mut delta);
        stream.fail("out of memory", &mut delta);
        assert_eq!(delta.text, "a");
        let finish = delta.finish.unwrap();
        assert_eq!(
            (finish.reason, finish.error.as_deref()),
            (FinishReason::Error, Some("out of memory"))
        );
    }
}

#[test]
fn a_cancelled_stream_stays_cancelled_when_its_last_text_was_a_stop_string() {
    let spec = StreamSpec {
        stop: vec!["\n".into()],
        ..StreamSpec::default()
    };
    let mut stream = TextStream::new(LLAMA.model.clone(), spec).unwrap();
    let mut delta = Delta::default();
    stream.push(&TokenInput::new(LLAMA.id("<0x0A>")), &mut delta);
    stream.finish(FinishReason::Abort, None, &mut delta);
    assert_eq!(
        (delta.text.as_str(), delta.finish.unwrap().reason),
        ("", FinishReason::Abort)
    );
}

#[test]
fn log_probabilities_name_tokens_by_text_and_bytes() {
    let spec = StreamSpec {
        num_logprobs: Some(1),
        ..StreamSpec::default()
    };
    let deltas = read(&BYTE_LEVEL, &[0xE6, 0x97, 0xA5], &spec, u64::MAX);
    assert!(deltas[..2].iter().all(|delta| delta.logprobs.is_empty()));
    let bytes: Vec<&[u8]> = deltas[2]
        .logprobs
        .iter()
        .map(|logprob| logprob.bytes.as_slice())
        .collect();
    assert_eq!(bytes, [[0xE6], [0x97], [0xA5]]);
    assert_eq!(deltas[2].logprobs[0].top[0].bytes, [0xE6]);
    assert_eq!(deltas[2].logprobs[0].top[0].text, "\u{FFFD}");
}
