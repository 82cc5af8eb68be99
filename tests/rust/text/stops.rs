//! The stop matcher against a search over the whole text.

use miniinfer_core::text::{StopMatcher, TextError};
use proptest::prelude::*;

/// End, length and index of the match that is complete first, the longest of those.
fn naive(text: &str, stops: &[String]) -> Option<(usize, usize, usize)> {
    (1..=text.len()).find_map(|end| {
        let mut best: Option<(usize, usize, usize)> = None;
        for (index, stop) in stops.iter().enumerate() {
            let longer = best.is_none_or(|(_, len, _)| stop.len() > len);
            if text.as_bytes()[..end].ends_with(stop.as_bytes()) && longer {
                best = Some((end, stop.len(), index));
            }
        }
        best
    })
}

/// The longest proper start of a stop string that the text ends with.
fn naive_held(text: &str, stops: &[String]) -> usize {
    let starts = |len: &usize| {
        stops.iter().any(|stop| {
            stop.len() > *len
                && stop
                    .as_bytes()
                    .starts_with(&text.as_bytes()[text.len() - len..])
        })
    };
    (0..=text.len()).filter(starts).max().unwrap_or(0)
}

/// The text in pieces, cut after each character for which `cuts` has a set bit.
pub fn pieces(text: &str, cuts: u64) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for (at, character) in text.chars().enumerate() {
        pieces.last_mut().unwrap().push(character);
        if cuts >> (at % 64) & 1 == 1 {
            pieces.push(String::new());
        }
    }
    pieces
}

fn check(text: &str, stops: &[String], include: bool, cuts: u64) {
    let mut matcher = StopMatcher::new(stops.to_vec(), include).unwrap();
    let expected = naive(text, stops);
    let (mut seen, mut out, mut found) = (0, String::new(), None);
    for piece in pieces(text, cuts) {
        found = matcher.push(&piece, true, &mut out);
        seen += piece.len();
        if found.is_some() {
            assert_eq!(matcher.push("later", true, &mut out), None);
            break;
        }
        let held = naive_held(&text[..seen], stops);
        assert_eq!((matcher.held(), out.as_str()), (held, &text[..seen - held]));
    }
    matcher.finish(&mut out);
    match expected {
        None => assert_eq!((found, out.as_str()), (None, text)),
        Some((end, len, index)) => {
            let found = found.unwrap();
            assert_eq!(
                (found.index, seen - found.unused),
                (index, end),
                "{text:?} {stops:?}"
            );
            assert_eq!(out, text[..if include { end } else { end - len }]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 5000, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_gives_what_a_search_over_the_whole_gives(
        text in "[ab日é😀]{0,24}",
        stops in proptest::collection::vec("[ab日é😀]{1,6}", 0..4),
        include: bool,
        cuts: u64,
    ) {
        check(&text, &stops, include, cuts);
    }

    #[test]
    fn text_that_is_exempt_passes_and_starts_no_match(
        exempt in "[ab]{0,8}",
        text in "[ab]{0,12}",
        stops in proptest::collection::vec("[ab]{1,5}", 1..3),
        cuts: u64,
    ) {
        let mut matcher = StopMatcher::new(stops.clone(), true).unwrap();
        let mut out = String::new();
        for piece in pieces(&exempt, cuts) {
            prop_assert_eq!(matcher.push(&piece, false, &mut out), None);
        }
        prop_assert_eq!(&out, &exempt);
        let found = matcher.push(&text, true, &mut out);
        matcher.finish(&mut out);
        let expected = naive(&text, &stops);
        prop_assert_eq!(found.map(|found| (text.len() - found.unused, found.index)),
            expected.map(|(end, _, index)| (end, index)));
        prop_assert_eq!(out, exempt + &text[..expected.map_or(text.len(), |(end, _, _)| end)]);
    }
}

#[test]
fn every_cut_of_a_short_text_gives_the_same() {
    let stops: Vec<String> = ["abab", "bb", "日本語", "b日"].map(String::from).to_vec();
    for text in ["aababb", "abaabab", "日本日本語", "abab日", "aaaa", ""] {
        for cuts in 0..1 << text.chars().count() {
            check(text, &stops, false, cuts);
            check(text, &stops, true, cuts);
        }
    }
}

#[test]
fn held_text_is_let_go_when_matching_is_switched_off() {
    let mut matcher = StopMatcher::new(vec!["abc".into()], false).unwrap();
    let mut out = String::new();
    assert_eq!(matcher.push("xab", true, &mut out), None);
    assert_eq!(out, "x");
    assert_eq!(matcher.push("c", false, &mut out), None);
    assert_eq!(out, "xabc");
    assert!(matcher.push("abc", true, &mut out).is_some());
    assert_eq!(out, "xabc");
}

#[test]
fn long_and_many_stop_strings_are_no_trouble() {
    let long = format!("{}b", "a".repeat(100_000));
    let mut stops: Vec<String> = (0..=255u8)
        .map(|byte| format!("{}!", char::from(byte)))
        .collect();
    stops.push(long.clone());
    let mut matcher = StopMatcher::new(stops, false).unwrap();
    let mut out = String::new();
    for _ in 0..200_000 {
        assert_eq!(matcher.push("a", true, &mut out), None);
    }
    assert_eq!((out.len(), matcher.held()), (100_000, 100_000));
    assert_eq!(matcher.push("b", true, &mut out).unwrap().index, 256);
    assert_eq!(out.len(), 100_000);
}

#[test]
fn an_empty_stop_string_is_refused_by_name() {
    for (stops, at) in [(vec![""], 0), (vec!["END", ""], 1)] {
        let Err(error) = StopMatcher::new(stops.into_iter().map(String::from).collect(), false)
        else {
            panic!("accepted")
        };
        assert!(matches!(error, TextError::EmptyStop { index } if index == at));
        assert_eq!(
            error.to_string(),
            format!("stop[{at}] is empty; a stop string needs at least one character")
        );
    }
}
