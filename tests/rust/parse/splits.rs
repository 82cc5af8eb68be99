//! However a text is cut, its parts are the same.

use miniinfer_core::parse::parse;
use proptest::prelude::*;

use crate::cases::{Case, all, parse_pieces};

/// Pieces of a text cut at these bytes, which are moved to the characters they are in.
fn pieces<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let mut cuts: Vec<usize> = cuts.to_vec();
    for cut in &mut cuts {
        while !text.is_char_boundary(*cut) {
            *cut -= 1;
        }
    }
    cuts.sort_unstable();
    let mut from = 0;
    let mut pieces = Vec::new();
    for to in cuts.into_iter().chain([text.len()]) {
        pieces.push(&text[from..to]);
        from = to;
    }
    pieces
}

fn check(case: &Case, cuts: &[usize]) {
    let whole = parse(&case.spec, &case.text);
    let pieces = pieces(&case.text, cuts);
    let parts = parse_pieces(&case.spec, pieces.iter().copied());
    assert_eq!(parts, whole, "{}: {pieces:?}", case.name);
}

#[test]
fn a_cut_anywhere_changes_nothing() {
    for case in all() {
        (0..=case.text.len()).for_each(|cut| check(&case, &[cut]));
    }
}

#[test]
fn two_cuts_anywhere_change_nothing() {
    for case in all() {
        let whole = parse(&case.spec, &case.text);
        let ends: Vec<usize> = case.text.char_indices().map(|(at, _)| at).collect();
        for (at, first) in ends.iter().enumerate() {
            for second in &ends[at..] {
                let text = &case.text;
                let pieces = [&text[..*first], &text[*first..*second], &text[*second..]];
                let parts = parse_pieces(&case.spec, pieces);
                assert_eq!(parts, whole, "{}: {pieces:?}", case.name);
            }
        }
    }
}

#[test]
fn single_characters_change_nothing() {
    for case in all() {
        check(&case, &(0..case.text.len()).collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn random_cuts_change_nothing(cuts in proptest::collection::vec(0.0..1.0f64, 0..12)) {
        for case in all() {
            let len = case.text.len() as f64;
            check(&case, &cuts.iter().map(|cut| (cut * len) as usize).collect::<Vec<_>>());
        }
    }
}
