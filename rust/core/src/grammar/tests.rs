use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::testing::{CALL, END, WORDS, byte_compiler, bytes_of, word};
use super::*;

fn spec(source: GrammarSource) -> GrammarSpec {
    GrammarSpec {
        source,
        whitespace: Whitespace::Bounded,
    }
}

fn schema(text: &str) -> GrammarSource {
    GrammarSource::JsonSchema(text.into())
}

fn compiled(source: GrammarSource) -> Arc<CompiledGrammar> {
    let named = format!("{source:?}");
    byte_compiler().compile(&spec(source)).expect(&named)
}

fn refusal(source: GrammarSource) -> String {
    let named = format!("{source:?}");
    let refused = byte_compiler().compile(&spec(source));
    refused.map(|_| ()).expect_err(&named).to_string()
}

fn allowed(cursor: &Cursor) -> Vec<u32> {
    let mask = cursor.mask().expect("a mask");
    (0..32 * mask.len() as u32)
        .filter(|&id| allows(&mask, id))
        .collect()
}

/// Follows a grammar by a rule that chooses among the allowed tokens, until it ends or so many have come.
fn walk(
    grammar: &Arc<CompiledGrammar>,
    most: usize,
    mut choose: impl FnMut(&[u32]) -> u32,
) -> (Vec<u8>, bool) {
    let cursor = Cursor::new(grammar.clone());
    let mut text = Vec::new();
    for _ in 0..most {
        let token = choose(&allowed(&cursor));
        if token == END {
            return (text, true);
        }
        text.extend(bytes_of(token));
        cursor.advance(token);
    }
    (text, false)
}

fn ascii(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.bytes().map(u32::from)
}

/// Schemas whose answers are short whatever is chosen, each with a look at the answer.
type Judge = fn(&Value) -> bool;
const SCHEMAS: [(&str, Judge); 8] = [
    (r#"{"type": "null"}"#, Value::is_null),
    (r#"{"type": "boolean"}"#, Value::is_boolean),
    (
        r#"{"type": "integer", "minimum": -3, "maximum": 120}"#,
        |v| v.as_i64().is_some_and(|n| (-3..=120).contains(&n)),
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
fn v75_what_is_no_schema_no_expression_and_no_grammar_is_refused_in_words() {
    let nested = |depth: usize| {
        let (open, close) = ("{\"items\": ".repeat(depth), "}".repeat(depth));
        GrammarSource::JsonSchema(format!("{open}{{}}{close}"))
    };
    for (source, words) in [
        (schema(r#"{"type": "objct"}"#), "objct"),
        (schema(r##"{"$ref": "#/$defs/nowhere"}"##), "nowhere"),
        (
            schema(r#"{"$ref": "http://localhost/x"}"#),
            "http://localhost/x",
        ),
        (schema(r##"{"$ref": "#"}"##), "no text can satisfy it"),
        (
            schema(r#"{"type": "string", "minLength": 2, "maxLength": 1}"#),
            "JSON schema",
        ),
        (nested(500), "recursion limit"),
        (GrammarSource::Regex("(".into()), "unclosed group"),
        (GrammarSource::Regex("a{2,1}".into()), "regular expression"),
        (GrammarSource::Lark("start: nobody".into()), "nobody"),
        (GrammarSource::Lark("start: <|nobody|>".into()), "nobody"),
        (GrammarSource::Lark(String::new()), "grammar"),
    ] {
        let message = refusal(source);
        assert!(message.contains(words), "{message}");
        assert!(!message.contains('\n') && message.len() < 400, "{message}");
    }
}

#[test]
fn v75_what_is_large_is_refused_or_compiled_and_never_fatal() {
    let chain = |length: usize, step: &str| {
        let steps = (0..length).map(|at| {
            let next = format!("{{\"$ref\": \"#/$defs/a{}\"}}", at + 1);
            format!("\"a{at}\": {}, ", step.replace("NEXT", &next))
        });
        let steps: String = steps.collect();
        let last = format!("\"a{length}\": {{\"type\": \"null\"}}");
        let start = "\"$ref\": \"#/$defs/a0\"";
        GrammarSource::JsonSchema(format!("{{\"$defs\": {{{steps}{last}}}, {start}}}"))
    };
    let rules = (0..40).map(|at| format!("R{at}: R{next} R{next}", next = at + 1));
    let doubling = rules.collect::<Vec<_>>().join("\n");
    let compiler = byte_compiler();
    for source in [
        GrammarSource::Regex("(a{1,1000}){1,1000}".into()),
        GrammarSource::Regex("(a|b)*a(a|b){400}".into()),
        GrammarSource::Lark(format!("{doubling}\nR40: \"a\"\nstart: R0\n")),
        GrammarSource::Lark("start: start start | \"\" | \"b\"".into()),
        schema(r#"{"type": "string", "minLength": 1000000}"#),
        schema(r#"{"type": "array", "minItems": 100000000}"#),
        schema(r#"{"type": "number", "multipleOf": 0.0000000001}"#),
        chain(3000, "NEXT"),
        chain(3000, "{\"allOf\": [NEXT, {\"type\": \"null\"}]}"),
        chain(3000, "{\"anyOf\": [NEXT, NEXT]}"),
        chain(3000, "{\"properties\": {\"a\": NEXT}}"),
    ] {
        let named = format!("{source:?}");
        if let Ok(grammar) = compiler.compile(&spec(source)) {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let cursor = Cursor::new(grammar);
                for _ in 0..20 {
                    // A cursor that cannot go on says so; it does not panic.
                    let Ok(mask) = cursor.mask() else { break };
                    let token = (0..270).find(|&id| id != END && allows(&mask, id));
                    let Some(token) = token else { break };
                    cursor.advance(token);
                }
            }));
            assert!(outcome.is_ok(), "{}", &named[..80]);
        }
    }
}

#[test]
fn v76_white_space_and_digits_come_to_an_end() {
    let blank = |token: u32| bytes_of(token).iter().all(u8::is_ascii_whitespace);
    let digit = |token: u32| bytes_of(token)[0].is_ascii_digit();
    let longest = |text: &[u8], is: fn(&u8) -> bool| {
        text.split(|byte| !is(byte))
            .map(<[u8]>::len)
            .max()
            .unwrap_or(0)
    };
    for text in [
        "{}",
        r#"{"type": "number"}"#,
        r#"{"type": "integer", "minimum": 5}"#,
    ] {
        let eager = |allowed: &[u32]| {
            let best = allowed
                .iter()
                .rev()
                .find(|&&token| token != END && digit(token));
            // Leave the number the way that leads into the next one.
            let way = [u32::from(b'.'), u32::from(b'e'), u32::from(b'-'), END];
            let other = way.iter().find(|token| allowed.contains(token));
            *best.or(other).unwrap_or(&allowed[0])
        };
        let (answer, ended) = walk(&compiled(schema(text)), 300, eager);
        assert!(ended, "{}", String::from_utf8_lossy(&answer));
        assert!(longest(&answer, u8::is_ascii_digit) <= 24 + 8, "{answer:?}");
    }
    for source in [
        GrammarSource::JsonObject,
        schema(r#"{"patternProperties": {"^x": {}}}"#),
    ] {
        let idle = |allowed: &[u32]| {
            let best = allowed
                .iter()
                .rev()
                .find(|&&token| token != END && blank(token));
            *best.unwrap_or(&allowed[0])
        };
        let (answer, _) = walk(&compiled(source), 300, idle);
        // Within strings there may be as much of it as there is of anything.
        let outside = answer.split(|&byte| byte == b'"').step_by(2);
        for part in outside {
            assert!(longest(part, u8::is_ascii_whitespace) <= 34, "{answer:?}");
        }
    }
    for keyword in ["not", "if", "uniqueItems", "contains", "dependentSchemas"] {
        let message = refusal(schema(&format!(
            "{{\"type\": \"array\", \"{keyword}\": true}}"
        )));
        assert!(message.contains(keyword), "{message}");
    }
}

#[test]
fn a_digit_is_still_allowed_where_a_string_or_a_pattern_holds_many() {
    let cursor = Cursor::new(compiled(schema(
        r#"{"type": "string", "pattern": "^[0-9]{40}$"}"#,
    )));
    for token in ascii("\"1234567890123456789012345678901234567890\"") {
        assert!(allowed(&cursor).contains(&token));
        cursor.advance(token);
    }
    assert_eq!(allowed(&cursor), [END]);
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
