//! What is wrong, large or endless: refused, or bounded, and never fatal.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::testing::{
    END, allowed, ascii, byte_compiler, bytes_of, compiled, refusal, schema, spec, walk,
};
use super::*;

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
