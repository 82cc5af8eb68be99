//! Bytes from outside that are not what they should be: an error or a model, never a panic.

use miniinfer_core::text::{Detokenizer, TextModel};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::vocabularies;

/// Values that stand where another kind is expected, or at the edge of what is allowed.
fn odd_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!(-1)),
        Just(json!(u64::MAX)),
        Just(json!(1e300)),
        Just(json!("")),
        Just(json!("\u{FFFD}\u{2581}")),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[[[1]]]]]])),
        Just(json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, 7]})),
    ]
}

/// All places of a document.
fn places(value: &Value, at: &str, into: &mut Vec<String>) {
    into.push(at.to_owned());
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(inner, &format!("{at}/{key}"), into);
            }
        }
        Value::Array(items) => {
            for (index, inner) in items.iter().enumerate() {
                places(inner, &format!("{at}/{index}"), into);
            }
        }
        _ => {}
    }
}

/// Loads what can be loaded and decodes with it.
fn try_it(bytes: &[u8], ids: &[u32]) {
    if let Ok(model) = TextModel::from_json(bytes) {
        let mut detokenizer = Detokenizer::new(model, false, true);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(id, &mut text);
        }
        detokenizer.finish(&mut text);
    }
}

fn documents() -> [Vec<u8>; 2] {
    let byte_level = vocabularies::byte_level(&json!({"type": "ByteLevel"}));
    [
        byte_level,
        vocabularies::sentence_piece(&vocabularies::llama_decoder()),
    ]
}

proptest! {
    #[test]
    fn a_damaged_byte_is_survived(
        which in 0..2usize,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        ids in prop::collection::vec(any::<u32>(), 0..20),
    ) {
        let mut bytes = documents()[which].clone();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        try_it(&bytes, &ids);
        bytes.truncate(cut.index(bytes.len()));
        try_it(&bytes, &ids);
    }

    #[test]
    fn an_odd_value_anywhere_is_survived(
        which in 0..2usize,
        at in any::<prop::sample::Index>(),
        odd in odd_value(),
        ids in prop::collection::vec(0..400u32, 0..20),
    ) {
        let mut document: Value = serde_json::from_slice(&documents()[which]).unwrap();
        let mut all = Vec::new();
        places(&document, "", &mut all);
        let place = at.get(&all);
        *document.pointer_mut(place).unwrap() = odd;
        try_it(document.to_string().as_bytes(), &ids);
    }
}
