//! Grammars against definitions, and what a request makes of them.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::testing::{
    CALL, END, WORDS, allowed, ascii, byte_compiler, bytes_of, compiled, schema, spec, walk, word,
};
use super::*;

/// Schemas whose answers are short whatever is chosen, each with a look at the answer.
type Judge = fn(&Value) -> bool;
const SCHEMAS: [(&str, Judge); 8] = [
    (r#"{"type": "null"}"#, Value::is_null),
    (r#"{"type": "boolean"}"#, Value::is_boolean),
    (
        r#"{"type": "integer", "minimum": -3, "maximum": 120}"#,
        // Minus zero is an integer too, which only a float can hold.
        |v| {
            v.as_f64()
                .is_some_and(|n| n.fract() == 0.0 && (-3.0..=120.0).contains(&n))
        },
    ),
    (r#"{"enum": ["a", "ab", 7, null]}"#, |v| {
        [Value::from("a"), "ab".into(), 7.into(), Value::Null].contains(v)
    }),
    (r#"{"type": "string", "maxLength": 3}"#, |v| {
        v.as_str().is_some_and(|s| s.chars().count() <= 3)
    }),
    (
        r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}"#,
        |v| {
            let items = v.as_array();
            items.is_some_and(|a| (1..=3).contains(&a.len()) && a.iter().all(Value::is_boolean))
        },
    ),
    (
        r#"{"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-c]{1,2}$"},
            "12": {"type": "null"}}, "required": ["name"], "additionalProperties": false}"#,
        |v| {
            let name = v["name"].as_str();
            name.is_some_and(|s| {
                (1..=2).contains(&s.len()) && s.bytes().all(|b| b"abc".contains(&b))
            }) && v
                .as_object()
                .is_some_and(|o| o.keys().all(|k| k == "name" || k == "12"))
        },
    ),
    (
        r##"{"$defs": {"leaf": {"anyOf": [{"const": 1}, {"const": false}]}},
            "type": "array", "prefixItems": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/leaf"}],
            "minItems": 2, "items": false}"##,
        |v| {
            let leaf = |v: &Value| v.as_i64() == Some(1) || v.as_bool() == Some(false);
            v.as_array()
                .is_some_and(|a| a.len() == 2 && a.iter().all(leaf))
        },
    ),
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_allowed_ends_in_json_that_the_schema_describes(
        which in 0..SCHEMAS.len(),
        draws in prop::collection::vec(any::<prop::sample::Index>(), 400),
    ) {
        let (text, judge) = SCHEMAS[which];
        let mut draws = draws.iter();
        let mut next = |allowed: &[u32]| allowed[draws.next().expect("enough").index(allowed.len())];
        let (answer, ended) = walk(&compiled(schema(text)), 400, &mut next);
        let shown = String::from_utf8_lossy(&answer).into_owned();
        prop_assert!(ended, "{}", shown);
        let value: Value = serde_json::from_slice(&answer).expect("JSON");
        prop_assert!(judge(&value), "{} is not {}", shown, text);
    }

    #[test]
    fn the_mask_is_that_of_the_definition(
        choices in prop::collection::btree_set("(name|true|12|\n|[ab\"\\\\(|é]){1,4}", 1..5),
        pick in any::<prop::sample::Index>(),
    ) {
        let choices: Vec<String> = choices.into_iter().collect();
        let cursor = Cursor::new(compiled(GrammarSource::Choice(choices.clone())));
        let goal = pick.get(&choices).as_bytes();
        for at in 0..=goal.len() {
            let so_far = &goal[..at];
            let leads = |token: u32| {
                let text = [so_far, &bytes_of(token)].concat();
                choices.iter().any(|choice| choice.as_bytes().starts_with(&text))
            };
            let texts = (0..256).chain((0..WORDS.len() as u32).map(|at| 258 + at));
            let mut expected: Vec<u32> = texts.filter(|&token| leads(token)).collect();
            if choices.iter().any(|choice| choice.as_bytes() == so_far) {
                expected.push(END);
            }
            expected.sort_unstable();
            prop_assert_eq!(allowed(&cursor), expected, "after {:?}", so_far);
            if let Some(&byte) = goal.get(at) {
                cursor.advance(byte.into());
            }
        }
    }
}

#[test]
fn white_space_stands_between_the_tokens_of_json_as_asked() {
    let with = |whitespace: Whitespace, text: &str| {
        let source = schema(r#"{"type": "array", "items": {"type": "boolean"}}"#);
        let spec = GrammarSpec { source, whitespace };
        let cursor = Cursor::new(byte_compiler().compile(&spec).expect("a schema"));
        ascii(text).all(|token| {
            let allowed = allowed(&cursor).contains(&token);
            cursor.advance(token);
            allowed
        })
    };
    for text in [
        "[true,false]",
        "[true, false]",
        "[\n  true,\n  false\n]",
        "[\r\n\ttrue]",
    ] {
        assert!(with(Whitespace::Bounded, text), "{text:?}");
    }
    for text in [" [", "[\n\n", "[   ", "[true] "] {
        assert!(!with(Whitespace::Bounded, text), "{text:?}");
    }
    assert!(with(Whitespace::Compact, "[true,false]"));
    assert!(!with(Whitespace::Compact, "[ "));
    let tabs = || Whitespace::Pattern("\t".into());
    assert!(with(tabs(), "[\ttrue]") && !with(tabs(), "[ "));
}

#[test]
fn special_tokens_come_where_a_grammar_names_them_and_nowhere_else() {
    let grammar = compiled(GrammarSource::Lark("start: <|call|> /[^a]*/".into()));
    let cursor = Cursor::new(grammar);
    assert_eq!(allowed(&cursor), [CALL]);
    cursor.advance(CALL);
    let then = allowed(&cursor);
    assert!(!then.contains(&CALL) && then.contains(&END) && then.contains(&word("true")));
    let by_id = compiled(GrammarSource::Lark(format!("start: <[{CALL}]> \"a\"")));
    assert_eq!(allowed(&Cursor::new(by_id)), [CALL]);
}

#[test]
fn choices_share_a_grammar_and_nothing_else() {
    let grammar = compiled(GrammarSource::Choice(vec!["12".into(), "true".into()]));
    let (one, other) = (Cursor::new(grammar.clone()), Cursor::new(grammar));
    one.advance(word("12"));
    assert_eq!(allowed(&one), [END]);
    other.advance(u32::from(b't'));
    assert_eq!(allowed(&other), [u32::from(b'r')]);
}

#[test]
fn tokens_may_be_told_before_anyone_asks_for_a_mask() {
    let grammar = compiled(GrammarSource::Choice(vec!["name".into()]));
    let cursor = Cursor::new(grammar);
    for token in ascii("nam") {
        cursor.advance(token);
    }
    assert_eq!(allowed(&cursor), [u32::from(b'e')]);
}

#[test]
fn a_token_that_is_not_allowed_ends_a_limit_with_a_reason() {
    let grammar = Some(compiled(GrammarSource::Choice(vec!["name".into()])));
    let limits = TokenLimits {
        grammar,
        ..TokenLimits::default()
    };
    let mut limit = Limit::new(&limits).expect("a grammar");
    assert!(limit.accept(&[u32::from(b'x')], false).is_err());
    let mut limit = Limit::new(&limits).expect("a grammar");
    assert_eq!(limit.accept(&[word("name")], false), Ok(Verdict::Continue));
    assert_eq!(
        limit.accept(&[word("name"), END], true),
        Ok(Verdict::Complete)
    );
}

#[test]
fn a_grammar_waits_for_the_ids_that_it_comes_after() {
    let limits = TokenLimits {
        grammar: Some(compiled(GrammarSource::Choice(vec!["12".into()]))),
        grammar_after: vec![7, 8],
        ..TokenLimits::default()
    };
    let mut limit = Limit::new(&limits).expect("a grammar");
    let output = [7, 7, 8, word("12"), END];
    for seen in 1..=3 {
        assert!(!limit.is_open() && limit.work().is_none());
        // An answer may end before its reasoning does.
        assert_eq!(limit.accept(&output[..seen], false), Ok(Verdict::Continue));
    }
    assert!(limit.is_open() && limit.work().is_some());
    assert_eq!(limit.accept(&output[..4], false), Ok(Verdict::Continue));
    assert_eq!(limit.accept(&output, true), Ok(Verdict::Complete));
}

#[test]
fn grammars_are_for_models_with_an_end_and_with_tokens_that_are_bytes() {
    let model = crate::text::TextModel::from_parts(&["a", "b"], &[]).expect("a model");
    let compiler = GrammarCompiler::new(model, 2, vec![9]);
    let refused = compiler
        .compile(&spec(GrammarSource::JsonObject))
        .expect_err("no end");
    assert!(refused.to_string().contains("end-of-sequence"), "{refused}");
}

#[test]
fn an_equal_request_finds_the_grammar_compiled() {
    let compiler = byte_compiler();
    let one = compiler
        .compile(&spec(GrammarSource::JsonObject))
        .expect("a grammar");
    let two = compiler
        .compile(&spec(GrammarSource::JsonObject))
        .expect("a grammar");
    assert!(Arc::ptr_eq(&one, &two));
    let other = byte_compiler()
        .compile(&spec(GrammarSource::JsonObject))
        .expect("a grammar");
    assert!(compiler.owns(&one) && !compiler.owns(&other));
}

#[test]
fn workers_compute_what_they_are_given_and_go_when_dropped() {
    let grammar = compiled(GrammarSource::JsonObject);
    let mut workers = MaskWorkers::default();
    workers.compute(std::iter::empty());
    let cursors: Vec<_> = (0..64)
        .map(|_| Arc::new(Cursor::new(grammar.clone())))
        .collect();
    for _ in 0..3 {
        for cursor in &cursors {
            cursor.advance(allowed(cursor)[0]);
        }
        workers.compute(cursors.iter().cloned());
    }
    let expected = allowed(&cursors[0]);
    assert!(cursors.iter().all(|cursor| allowed(cursor) == expected));
}

#[test]
fn text_without_quotes_goes_on_to_the_tag_that_ends_it() {
    let lark = r#"start: "<p>" value "\n</call>"
value[suffix="</p>"]: /(?s:.*)/"#;
    let cursor = Cursor::new(compiled(GrammarSource::Lark(lark.into())));
    for token in ascii("<p>\"New\nYork\" <12> </q></p>\n</call>") {
        assert!(allowed(&cursor).contains(&token));
        cursor.advance(token);
    }
    assert_eq!(allowed(&cursor), [END]);
}
