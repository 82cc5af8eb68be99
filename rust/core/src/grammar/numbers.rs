//! Numbers in schemas that the library would round, or cut to the nearest that it knows.

use serde_json::{Number, StreamDeserializer, Value, de::StrRead};

/// Beyond it not every integer is a float64, which the library computes bounds with.
const EXACT: u64 = 1 << 53;

/// Keywords that map names to schemas.
const SCHEMAS_BY_NAME: [&str; 5] = [
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
];

/// Keywords whose values constrain nothing.
const REMARKS: [&str; 2] = ["default", "examples"];

/// Refuses the first number of a schema that could not be kept to, by its keyword.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Array(schemas) => schemas.iter().try_for_each(check_schema),
        Value::Object(keywords) => keywords
            .iter()
            .try_for_each(|(keyword, value)| check_keyword(keyword, value)),
        _ => Ok(()),
    }
}

/// The same for the schemas within a grammar in Lark's syntax. What is no JSON is left to its parser.
pub(super) fn check_lark(text: &str) -> Result<(), String> {
    for (at, keyword) in text.match_indices("%json") {
        let json = StrRead::new(&text[at + keyword.len()..]);
        if let Some(Ok(schema)) = StreamDeserializer::<_, Value>::new(json).next() {
            check_schema(&schema)?;
        }
    }
    Ok(())
}

fn check_keyword(keyword: &str, value: &Value) -> Result<(), String> {
    match (keyword, value) {
        ("minimum" | "maximum", Value::Number(number)) => {
            check(keyword, number, is_exact_bound(number))
        }
        ("exclusiveMinimum" | "exclusiveMaximum" | "multipleOf", Value::Number(number)) => {
            check(keyword, number, is_small(number))
        }
        ("const" | "enum", _) => check_constant(keyword, value),
        (_, Value::Object(schemas)) if SCHEMAS_BY_NAME.contains(&keyword) => {
            schemas.values().try_for_each(check_schema)
        }
        _ if REMARKS.contains(&keyword) => Ok(()),
        _ => check_schema(value),
    }
}

fn check_constant(keyword: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) => check(keyword, number, is_exact_bound(number)),
        Value::Array(values) => values
            .iter()
            .try_for_each(|value| check_constant(keyword, value)),
        Value::Object(values) => values
            .values()
            .try_for_each(|value| check_constant(keyword, value)),
        _ => Ok(()),
    }
}

fn check(keyword: &str, number: &Number, kept: bool) -> Result<(), String> {
    if kept {
        return Ok(());
    }
    let limit = "a number of less than 2^63 that a float64 holds exactly";
    Err(format!("{keyword} must be {limit}; got {number}"))
}

/// Whether the way through a float64 to an integer of 64 bits changes nothing; it saturates, so that
/// the largest integer stays what it is. The least has no counterpart to take its digits from.
fn is_exact_bound(number: &Number) -> bool {
    match number.as_i64() {
        Some(integer) => integer != i64::MIN && integer as f64 as i64 == integer,
        None => number
            .as_f64()
            .is_some_and(|value| value.abs() < 2f64.powi(63)),
    }
}

/// Whether there is room to count on by 1.
fn is_small(number: &Number) -> bool {
    number
        .as_f64()
        .is_some_and(|value| value.abs() < EXACT as f64)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compiled, refusal, schema, walk};
    use super::super::{GrammarSource, allows};

    const KEYWORDS: [&str; 5] = [
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ];

    #[test]
    fn a_number_that_would_be_changed_is_refused_with_its_keyword_and_value() {
        for (number, shown) in [
            ("100000000000000000000", "1e+20"),
            ("-100000000000000000000", "-1e+20"),
            ("18446744073709551615", "18446744073709551615"),
            ("1e300", "1e+300"),
            ("9007199254740993", "9007199254740993"),
            ("-9223372036854775808", "-9223372036854775808"),
        ] {
            let bounds = KEYWORDS.map(|keyword| (keyword, format!("\"{keyword}\": {number}")));
            let constants = [
                ("const", format!("\"const\": {number}")),
                ("enum", format!("\"enum\": [1, {{\"a\": [{number}]}}]")),
            ];
            for (keyword, text) in bounds.into_iter().chain(constants) {
                for kind in ["integer", "number"] {
                    let inner = match keyword {
                        "const" | "enum" => format!("{{{text}}}"),
                        _ => format!("{{\"type\": \"{kind}\", {text}}}"),
                    };
                    let places = [
                        schema(&inner),
                        schema(&format!("{{\"properties\": {{\"const\": {inner}}}}}")),
                        schema(&format!("{{\"anyOf\": [{{\"type\": \"null\"}}, {inner}]}}")),
                        GrammarSource::Lark(format!("start: \"x\" %json {inner}\n")),
                    ];
                    for source in places {
                        let message = refusal(source);
                        assert!(message.contains(&format!("{keyword} must")), "{message}");
                        assert!(message.ends_with(&format!("got {shown}")), "{message}");
                    }
                }
            }
        }
    }

    #[test]
    fn bounds_within_reach_are_kept_to_the_last_digit() {
        for bound in [
            "9223372036854775807",
            "-1152921504606846976",
            "1152921504606846976",
        ] {
            let text =
                format!("{{\"type\": \"integer\", \"minimum\": {bound}, \"maximum\": {bound}}}");
            let (answer, ended) = walk(&compiled(schema(&text)), 40, |allowed| allowed[0]);
            assert!(ended);
            assert_eq!(String::from_utf8_lossy(&answer), bound);
        }
    }

    #[test]
    fn a_name_or_a_remark_is_no_bound() {
        for text in [
            r#"{"properties": {"minimum": {"type": "null"}, "enum": {"type": "null"}}}"#,
            r#"{"type": "null", "default": {"minimum": 1e300}, "examples": [{"const": 1e300}]}"#,
        ] {
            let cursor = super::super::Cursor::new(compiled(schema(text)));
            assert!(
                cursor
                    .mask()
                    .is_ok_and(|mask| (0..256).any(|id| allows(&mask, id)))
            );
        }
    }
}
