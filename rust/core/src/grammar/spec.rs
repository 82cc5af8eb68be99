//! What form an answer is to have.

use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

use super::error::GrammarError;
use super::numbers;

/// Longest text of a grammar, in bytes.
const MAX_BYTES: usize = 256 * 1024;

/// Brackets within brackets that a grammar may have.
const MAX_DEPTH: usize = 200;

/// White space between the tokens of JSON unless the caller says otherwise: a space or two, or one line break
/// and an indentation. A model that would rather write blanks than an answer soon has to go on.
const WHITESPACE: &str = r"[ ]{1,2}|\r?\n[ \t]{0,32}";

/// The form itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes, given as JSON text.
    JsonSchema(String),
    /// Text that a regular expression matches from end to end, in the syntax of Rust's `regex` crate.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text that a context-free grammar in Lark's syntax, as llguidance reads it, derives from `start`.
    Lark(String),
}

/// White space between the tokens of JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Whitespace {
    /// A space or two, or a line break and an indentation.
    #[default]
    Bounded,
    /// None at all.
    Compact,
    /// What this regular expression matches.
    Pattern(String),
}

/// What is asked for, as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GrammarSpec {
    /// The form.
    pub source: GrammarSource,
    /// White space in JSON; other forms say themselves what they allow.
    pub whitespace: Whitespace,
}

impl GrammarSource {
    /// What the caller calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "list of choices",
            Self::Lark(_) => "grammar",
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }
}

impl GrammarSpec {
    /// Whether JSON values are part of the form, whose numbers have no end of their own.
    pub(super) fn has_json(&self) -> bool {
        match &self.source {
            GrammarSource::JsonObject | GrammarSource::JsonSchema(_) => true,
            GrammarSource::Lark(text) => text.contains("%json"),
            GrammarSource::Regex(_) | GrammarSource::Choice(_) => false,
        }
    }

    /// The form as the library takes it, checked for what the library would choke on.
    pub(super) fn to_grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        let kind = self.source.kind();
        let bytes = self.source.num_bytes();
        if bytes > MAX_BYTES {
            let limit = MAX_BYTES;
            return Err(GrammarError::TooLong { kind, limit, bytes });
        }
        match &self.source {
            GrammarSource::JsonObject => Ok(self.json(json!({"type": "object"}))),
            GrammarSource::JsonSchema(text) => {
                let schema = serde_json::from_str(text)
                    .map_err(|error| GrammarError::refused(kind, &format!("no JSON: {error}")))?;
                numbers::check_schema(&schema)
                    .map_err(|message| GrammarError::refused(kind, &message))?;
                match schema {
                    Value::Object(_) => Ok(self.json(schema)),
                    Value::Bool(true) => Ok(self.json(json!({}))),
                    _ => Err(GrammarError::refused(kind, "it must be an object")),
                }
            }
            GrammarSource::Regex(text) => {
                check_depth(kind, text)?;
                Ok(TopLevelGrammar::from_regex(text))
            }
            GrammarSource::Choice(texts) => choices(texts),
            GrammarSource::Lark(text) => {
                check_depth(kind, text)?;
                if text.contains("::=") {
                    let message = "it must be in Lark's syntax, `rule: ...`, not `rule ::= ...`";
                    return Err(GrammarError::refused(kind, message));
                }
                numbers::check_lark(text)
                    .map_err(|message| GrammarError::refused(kind, &message))?;
                Ok(TopLevelGrammar::from_lark(text.clone()))
            }
        }
    }

    /// A schema with the white space asked for. What the schema itself says about it does not count.
    fn json(&self, mut schema: Value) -> TopLevelGrammar {
        let options = match &self.whitespace {
            Whitespace::Bounded => json!({"whitespace_pattern": WHITESPACE}),
            Whitespace::Compact => json!({"whitespace_flexible": false}),
            Whitespace::Pattern(pattern) => json!({"whitespace_pattern": pattern}),
        };
        if let Some(fields) = schema.as_object_mut() {
            let fields: &mut Map<String, Value> = fields;
            fields.insert("x-guidance".into(), options);
        }
        TopLevelGrammar::from_json_schema(schema)
    }
}

/// One terminal of all texts, so that one may begin with another.
fn choices(texts: &[String]) -> Result<TopLevelGrammar, GrammarError> {
    if texts.is_empty() {
        return Err(GrammarError::NoChoice);
    }
    let quoted: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
    let lark = format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | "));
    Ok(TopLevelGrammar::from_lark(lark))
}

/// The parsers of expressions and grammars recurse at each bracket.
fn check_depth(kind: &'static str, text: &str) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            let limit = MAX_DEPTH;
            return Err(GrammarError::TooDeep { kind, limit, depth });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grammar(source: GrammarSource) -> Result<TopLevelGrammar, GrammarError> {
        let whitespace = Whitespace::Bounded;
        GrammarSpec { source, whitespace }.to_grammar()
    }

    #[test]
    fn what_a_parser_would_choke_on_is_refused_with_limit_and_value() {
        let long = grammar(GrammarSource::Regex("a".repeat(MAX_BYTES + 1)));
        let message = long.expect_err("too long").to_string();
        assert!(
            message.contains("262144") && message.contains("262145"),
            "{message}"
        );
        let deep = grammar(GrammarSource::Lark("(".repeat(100_000)));
        assert!(deep.expect_err("too deep").to_string().contains("201"));
        let old = grammar(GrammarSource::Lark("root ::= \"a\"".into()));
        assert!(
            old.expect_err("another syntax")
                .to_string()
                .contains("Lark")
        );
        assert_eq!(
            grammar(GrammarSource::Choice(vec![])).expect_err("none"),
            GrammarError::NoChoice
        );
    }

    #[test]
    fn a_schema_is_an_object_or_true() {
        for text in ["[]", "3", "\"x\"", "null", "false", "{", ""] {
            let refusal = grammar(GrammarSource::JsonSchema(text.into())).expect_err(text);
            assert!(
                refusal
                    .to_string()
                    .starts_with("the JSON schema cannot be used"),
                "{refusal}"
            );
        }
        grammar(GrammarSource::JsonSchema("true".into())).expect("any JSON");
    }

    #[test]
    fn a_schema_cannot_loosen_its_own_white_space() {
        let text = r#"{"type": "null", "x-guidance": {"whitespace_pattern": "[ ]+"}}"#;
        let grammar = grammar(GrammarSource::JsonSchema(text.into())).expect("a schema");
        let schema = grammar.grammars[0].json_schema.as_ref().expect("a schema");
        assert_eq!(schema["x-guidance"]["whitespace_pattern"], WHITESPACE);
    }
}
