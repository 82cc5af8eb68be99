//! The text of a stream is the library's decode of all its ids, whatever the ids.

use std::sync::LazyLock;

use miniinfer_core::text::{Detokenizer, TextError, TextModel};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use serde_json::json;

use crate::vocabularies::{self, Pair};

static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(vocabularies::all);

fn assert_decodes(pair: &Pair, ids: &[u32]) {
    for skip in [false, true] {
        let deltas = pair.stream(ids, skip, false);
        assert_eq!(
            deltas.concat(),
            pair.decode(ids, skip),
            "{}, {ids:?}, skip {skip}",
            pair.name
        );
    }
}

/// Ids of a small vocabulary and a few outside of it; half of them bytes.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let id = prop_oneof![4 => 0..24u32, 4 => 60..290u32, 1 => 276..300u32, 1 => Just(u32::MAX)];
    proptest::collection::vec(id, 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_decoder_gives_the_librarys_text(ids in ids()) {
        for pair in PAIRS.iter() {
            assert_decodes(pair, &ids);
        }
    }

    /// A continuation is what a token before adds nothing to.
    #[test]
    fn a_continuation_keeps_its_leading_space(ids in ids()) {
        for pair in PAIRS.iter().filter(|pair| pair.model.token_text(6).0 == "a") {
            // Decoders that see everything at once or merge equal neighbours have no such rule.
            if pair.name.starts_with("ctc") || pair.name == "regex over all" || pair.name == "suffix" {
                continue;
            }
            let after = [&[6], ids.as_slice()].concat();
            let whole = pair.decode(&after, false);
            prop_assert_eq!(pair.stream(&ids, false, true).concat(), whole.strip_prefix('a').unwrap(), "{}", pair.name);
        }
    }

    /// Only the bytes of an unfinished character are ever held back by a byte-level tokenizer.
    #[test]
    fn byte_level_text_is_not_held_longer_than_needed(ids in ids()) {
        let pair = PAIRS.iter().find(|pair| pair.name == "byte-level").unwrap();
        let deltas = pair.stream(&ids, false, false);
        for count in 0..=ids.len() {
            let now = pair.decode(&ids[..count], false);
            let sent = deltas[..count].concat();
            let held = now.strip_prefix(&sent).expect("what was sent stays");
            prop_assert!(held.is_empty() || held == "\u{FFFD}", "{held:?} is held");
        }
    }
}

#[test]
fn real_tokenizers_give_the_librarys_text() {
    let mut random = proptest::test_runner::TestRunner::deterministic();
    for pair in vocabularies::real() {
        let size = pair.model.vocabulary_size() as u32;
        assert!(
            size as usize >= pair.oracle.get_vocab_size(true),
            "{}",
            pair.name
        );
        let partial: Vec<u32> = (0..size)
            .filter(|id| {
                let (text, bytes) = pair.model.token_text(*id);
                text.contains('\u{FFFD}') || bytes.len() == 1
            })
            .collect();
        assert!(
            partial.len() > 100,
            "{}: {} byte tokens",
            pair.name,
            partial.len()
        );
        let special: Vec<u32> = (0..size).filter(|id| pair.model.is_special(*id)).collect();
        let byte = proptest::sample::select(partial);
        let id = prop_oneof![3 => 0..size + 3, 3 => byte, 1 => proptest::sample::select(special)];
        let ids = proptest::collection::vec(id, 0..40);
        for _ in 0..2000 {
            assert_decodes(&pair, &ids.new_tree(&mut random).unwrap().current());
        }
        for id in 0..size + 3 {
            assert_decodes(&pair, &[id]);
        }
        for text in [
            "ďábel 日本 😀👩‍👧\n\tfn main() {}  x",
            "  two spaces\r\n\u{FFFD}",
            "ש ל naïve 𝔘",
        ] {
            let ids = pair.oracle.encode(text, true).unwrap();
            assert_decodes(&pair, ids.get_ids());
        }
    }
}

#[test]
fn a_list_vocabulary_and_an_odd_added_token_decode_as_in_the_library() {
    let added = |content: &str, normalized: bool| {
        json!({"id": 9, "content": content, "special": true, "normalized": normalized, "single_word": false,
            "lstrip": false, "rstrip": false})
    };
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "Lowercase"},
        "added_tokens": [added("b", false), added("NEW", true), added("Other", false), added("", false),
            added("NEW", true)],
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.5]]}});
    let pair = Pair::new("list", file.to_string().as_bytes());
    assert_eq!(
        pair.stream(&[0, 1, 2, 3, 4, 5, 9], false, false).concat(),
        "<unk>abnewOther"
    );
    // A normalized special token is not found among the special ones by its normalized name; the library shows it too.
    assert_decodes(&pair, &[0, 1, 2, 3, 4, 5, 9]);
    assert_eq!(pair.model.vocabulary_size(), 5);
}

#[test]
fn stripping_the_end_of_nothing_does_not_panic() {
    let decoder = json!({"type": "Sequence", "decoders": [{"type": "Fuse"},
        {"type": "Strip", "content": "a", "start": 0, "stop": 3}]});
    let model = TextModel::from_json(&vocabularies::sentence_piece(&decoder)).unwrap();
    for ids in [[10, 10], [6, 6]] {
        let mut detokenizer = Detokenizer::new(model.clone(), false, false);
        let mut text = String::new();
        ids.iter().for_each(|id| detokenizer.push(*id, &mut text));
        detokenizer.finish(&mut text);
        assert_eq!(text, "");
    }
}

#[test]
fn a_bad_file_is_an_error_that_says_what_is_wrong() {
    let huge =
        json!({"added_tokens": [], "model": {"vocab": {"a": 4_000_000_000u32}}, "decoder": null});
    let decoder = json!({"model": {"vocab": {"a": 0}}, "decoder": {"type": "Rot13"}});
    let normalizer = json!({"added_tokens": [{"content": "a", "normalized": true}], "model": {"vocab": {"a": 0}},
        "normalizer": {"type": "Rot13"}});
    let cases = [
        (String::from("{"), "tokenizer.json: EOF"),
        (String::from("[]"), "tokenizer.json: "),
        (json!({"model": {}}).to_string(), "missing field `vocab`"),
        (
            json!({"model": {"vocab": {"a": -1}}}).to_string(),
            "invalid value: integer `-1`",
        ),
        (
            json!({"model": {"vocab": 7}}).to_string(),
            "a map of token to id",
        ),
        (
            huge.to_string(),
            "token id 4000000000 of \"a\" is above the limit of 4194303",
        ),
        (decoder.to_string(), "tokenizer.json: decoder: "),
        (normalizer.to_string(), "tokenizer.json: normalizer: "),
    ];
    for (file, expected) in cases {
        let Err(error) = TextModel::from_json(file.as_bytes()) else {
            panic!("{file} was accepted")
        };
        assert!(error.to_string().contains(expected), "{file}: {error}");
    }
    assert!(matches!(
        TextModel::from_json(b"\xFF"),
        Err(TextError::Json(_))
    ));
}

#[test]
fn the_text_of_one_token_is_given_with_its_bytes() {
    let pair = vocabularies::gpt2();
    assert_eq!(
        pair.model.token_text(0xE6),
        ("\u{FFFD}".to_owned(), vec![0xE6])
    );
    assert_eq!(
        pair.model.token_text(257),
        (" world".to_owned(), b" world".to_vec())
    );
    assert_eq!(pair.model.token_text(u32::MAX), (String::new(), Vec::new()));
    let pair = vocabularies::llama();
    assert_eq!(pair.model.token_text(pair.id("▁Hello")).0, " Hello");
    assert_eq!(
        pair.model.token_text(pair.id("<0xE6>")),
        ("\u{FFFD}".to_owned(), vec![0xE6])
    );
}
