//! Cases that broke other servers; each name says what went wrong there.

use std::sync::Arc;

use miniinfer_core::text::{
    Delta, FinishReason, StopCause, StopToken, StreamSpec, TextModel, TextStream, TokenInput,
    Verdict,
};

use crate::vocabularies::{self, Pair};

/// A byte-level model whose tokens are the pieces given, in order; the last id is a special `<|user|>`.
fn model(pieces: &[&[u8]]) -> Arc<TextModel> {
    let mut tokens: Vec<&[u8]> = pieces.to_vec();
    tokens.push(b"<|user|>");
    TextModel::from_parts(&tokens, &[pieces.len() as u32]).unwrap()
}

/// Pushes every piece and ends with `length`; the deltas, the finish delta last.
fn run(pieces: &[&[u8]], spec: StreamSpec) -> Vec<Delta> {
    let mut stream = TextStream::new(model(pieces), spec).unwrap();
    let mut deltas = Vec::new();
    for id in 0..pieces.len() as u32 {
        let mut delta = Delta::default();
        let verdict = stream.push(&TokenInput::new(id), &mut delta);
        deltas.push(delta);
        if verdict == Verdict::Stopped {
            return deltas;
        }
    }
    deltas.push(Delta::default());
    stream.finish(FinishReason::Length, None, deltas.last_mut().unwrap());
    deltas
}

fn texts(deltas: &[Delta]) -> Vec<&str> {
    deltas.iter().map(|delta| delta.text.as_str()).collect()
}

fn reason(deltas: &[Delta]) -> (FinishReason, StopCause) {
    let finish = deltas.last().unwrap().finish.clone().unwrap();
    (finish.reason, finish.stop)
}

fn stop(stops: &[&str]) -> StreamSpec {
    StreamSpec {
        stop: stops.iter().map(|stop| (*stop).to_owned()).collect(),
        ..StreamSpec::default()
    }
}

#[test]
fn v1_a_character_cut_by_the_limit_is_one_replacement_in_both_forms() {
    let pieces: [&[u8]; 4] = [b"Hi ", b"\xF0", b"\x9F", b"\x98"];
    let streamed = run(&pieces, StreamSpec::default());
    assert_eq!(texts(&streamed), ["Hi ", "", "", "", "\u{FFFD}"]);
    assert_eq!(streamed[4].token_ids, [1, 2, 3]);
    let whole = run(
        &pieces,
        StreamSpec {
            final_only: true,
            ..StreamSpec::default()
        },
    );
    assert!(whole[..4].iter().all(Delta::is_empty));
    assert_eq!(
        (whole[4].text.as_str(), whole[4].token_ids.as_slice()),
        ("Hi \u{FFFD}", &[0, 1, 2, 3][..])
    );
    assert_eq!(reason(&whole), (FinishReason::Length, StopCause::None));
}

#[test]
fn v2_no_byte_sequence_raises_and_none_loses_its_tail() {
    let bytes = [
        0x41, 0x20, 0xC3, 0xA9, 0xE6, 0x98, 0xAF, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0xFF,
        0xED, 0xA0,
    ];
    let (byte_level, llama) = (vocabularies::gpt2(), vocabularies::llama());
    let first = llama.id("<0x00>");
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = |bound: usize| {
        // Marsaglia's xorshift: a fixed, even spread of cases.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % bound
    };
    for _ in 0..100_000 {
        let ids: Vec<u32> = (0..=next(9)).map(|_| bytes[next(bytes.len())]).collect();
        let raw: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
        assert_eq!(
            byte_level.stream(&ids, true, false).concat(),
            String::from_utf8_lossy(&raw)
        );
        let ids: Vec<u32> = ids.iter().map(|id| id + first).collect();
        let replaced = || "\u{FFFD}".repeat(raw.len());
        let text = String::from_utf8(raw.clone()).unwrap_or_else(|_| replaced());
        assert_eq!(llama.stream(&ids, true, true).concat(), text);
        assert_eq!(
            llama.stream(&ids, true, false).concat(),
            llama.decode(&ids, true)
        );
    }
}

#[test]
fn v3_characters_of_several_tokens_never_show_in_pieces() {
    let text = "ďábel 日本 😀👩‍👧";
    let byte_level = vocabularies::gpt2();
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    let deltas = byte_level.stream(&ids, true, false);
    assert!(
        deltas
            .iter()
            .all(|delta| delta.chars().count() <= 1 && !delta.contains('\u{FFFD}'))
    );
    assert_eq!(deltas.concat(), text);
    let llama = vocabularies::llama();
    let first = llama.id("<0x00>");
    let ids: Vec<u32> = ids.iter().map(|id| id + first).collect();
    assert_eq!(llama.stream(&ids, true, false).concat(), text);
}

#[test]
fn v4_a_space_before_an_unfinished_character_flushes_nothing() {
    let deltas = run(
        &[b"\x20\xD7", b"\xA9\x20\xD7", b"\x9C"],
        StreamSpec::default(),
    );
    assert_eq!(texts(&deltas), [" ", "ש ", "ל", ""]);
}

#[test]
fn v5_the_first_generated_token_keeps_its_leading_space() {
    let llama = vocabularies::llama();
    let ids: Vec<u32> = ["▁world", ".", "▁It"]
        .iter()
        .map(|token| llama.id(token))
        .collect();
    assert_eq!(llama.stream(&ids, true, true), [" world", ".", " It", ""]);
    assert_eq!(llama.stream(&ids, true, false), ["world", ".", " It", ""]);
}

#[test]
fn v6_no_part_of_a_stop_string_shows_before_it_matches() {
    let pieces: [&[u8]; 4] = [b"TU", b"V", b"WX", b"Y"];
    let deltas = run(&pieces, stop(&["TUVWXY"]));
    assert!(deltas[..3].iter().all(Delta::is_empty));
    assert_eq!(
        (deltas[3].text.as_str(), deltas[3].token_ids.as_slice()),
        ("", &[0, 1, 2, 3][..])
    );
    assert_eq!(
        reason(&deltas),
        (FinishReason::Stop, StopCause::Text("TUVWXY".into()))
    );
    let shown = run(
        &pieces,
        StreamSpec {
            include_stop: true,
            ..stop(&["TUVWXY"])
        },
    );
    assert_eq!(texts(&shown).concat(), "TUVWXY");

    let deltas = run(&[b"ab", b"cdX"], stop(&["bc"]));
    assert_eq!(texts(&deltas), ["a", ""]);
    let shown = run(
        &[b"ab", b"cdX"],
        StreamSpec {
            include_stop: true,
            ..stop(&["bc"])
        },
    );
    assert_eq!(texts(&shown).concat(), "abc");

    let deltas = run(&[b"TU", b"V", b"Z"], stop(&["TUVWXY"]));
    assert_eq!(texts(&deltas), ["", "", "TUVZ", ""]);
    assert_eq!(deltas[2].token_ids, [0, 1, 2]);
    assert_eq!(reason(&deltas), (FinishReason::Length, StopCause::None));
}

const LINES: [&[u8]; 6] = [b"a", b"\n", b"b", b"c", b"\n", b"d"];

#[test]
fn v7_a_stop_string_before_min_tokens_does_not_count() {
    let deltas = run(
        &LINES,
        StreamSpec {
            min_tokens: 4,
            ..stop(&["\n"])
        },
    );
    assert_eq!(texts(&deltas), ["a", "\n", "b", "c", ""]);
    assert_eq!(
        reason(&deltas),
        (FinishReason::Stop, StopCause::Text("\n".into()))
    );
    assert_eq!(deltas[4].num_output_tokens, 5);
}

#[test]
fn v7_holds_for_byte_tokens_whose_text_comes_late() {
    let llama = vocabularies::llama();
    let ids: Vec<u32> = ["a", "<0x0A>", "a", "a", "<0x0A>", "a"]
        .iter()
        .map(|token| llama.id(token))
        .collect();
    for (min_tokens, expected, count) in [
        (0, "a", 2),
        (1, "a", 2),
        (2, "a\naa", 5),
        (4, "a\naa", 5),
        (5, "a\naa\na", 6),
    ] {
        let (text, ids, finish) = collect(
            &llama,
            &ids,
            StreamSpec {
                min_tokens,
                ..stop(&["\n"])
            },
        );
        assert_eq!(
            (text.as_str(), ids.len()),
            (expected, count),
            "min_tokens {min_tokens}"
        );
        let reason = if min_tokens == 5 {
            FinishReason::Length
        } else {
            FinishReason::Stop
        };
        assert_eq!(finish, reason, "min_tokens {min_tokens}");
    }
}

#[test]
fn a_stop_string_in_the_last_byte_run_is_found_at_the_end() {
    let llama = vocabularies::llama();
    let ids: Vec<u32> = ["a", "<0x0A>", "<0x0A>"]
        .iter()
        .map(|token| llama.id(token))
        .collect();
    let (text, delivered, finish) = collect(&llama, &ids, stop(&["\n"]));
    assert_eq!(
        (text.as_str(), delivered.as_slice(), finish),
        ("a", &ids[..2], FinishReason::Stop)
    );
}

fn collect(pair: &Pair, ids: &[u32], spec: StreamSpec) -> (String, Vec<u32>, FinishReason) {
    let mut stream = TextStream::new(
        pair.model.clone(),
        StreamSpec {
            continuation: true,
            ..spec
        },
    )
    .unwrap();
    let mut all = Delta::default();
    for id in ids {
        if stream.push(&TokenInput::new(*id), &mut all) == Verdict::Stopped {
            break;
        }
    }
    stream.finish(FinishReason::Length, None, &mut all);
    assert_eq!(all.num_output_tokens as usize, all.token_ids.len());
    (all.text, all.token_ids, all.finish.unwrap().reason)
}

#[test]
fn v8_an_empty_stop_string_is_refused() {
    let refused = TextStream::new(model(&[b"a"]), stop(&["END", ""]));
    assert!(refused.is_err_and(|error| error.to_string().contains("stop[1]")));
    assert!(TextStream::new(model(&[b"a"]), stop(&[])).is_ok());
}

#[test]
fn v9_the_token_that_stops_is_counted_and_not_shown() {
    let requested: fn(TokenInput<'static>) -> StopToken<'static> = StopToken::Requested;
    let cases = [
        (requested, false, "plan", StopCause::Token(1)),
        (StopToken::EndOfSequence, false, "plan", StopCause::None),
        (StopToken::EndOfSequence, true, "plan", StopCause::None),
        (requested, true, "plan<|user|>", StopCause::Token(1)),
    ];
    for (kind, include_stop, text, cause) in cases {
        let spec = StreamSpec {
            include_stop,
            ..stop(&["planX"])
        };
        let mut stream = TextStream::new(model(&[b"plan"]), spec).unwrap();
        let mut delta = Delta::default();
        assert_eq!(
            stream.push(&TokenInput::new(0), &mut delta),
            Verdict::Continue
        );
        assert!(delta.is_empty());
        stream.finish(
            FinishReason::Stop,
            Some(kind(TokenInput::new(1))),
            &mut delta,
        );
        assert_eq!(
            (delta.text.as_str(), delta.token_ids.as_slice()),
            (text, &[0, 1][..])
        );
        assert_eq!(delta.num_output_tokens, 2);
        let finish = delta.finish.unwrap();
        assert_eq!((finish.reason, finish.stop), (FinishReason::Stop, cause));
    }
}
