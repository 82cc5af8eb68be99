//! The cases of `tests/data/parser_cases.json`, and what a reader makes of parts.

use std::collections::HashMap;
use std::sync::Arc;

use miniinfer_core::parse::{
    ParameterType, ParseSpec, Parser, Part, ReasoningFormat, ToolFormat, ToolTypes, parse,
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseFile {
    name: String,
    reasoning_parser: Option<String>,
    tool_parser: Option<String>,
    in_reasoning: Option<bool>,
    #[serde(default)]
    tool_types: HashMap<String, HashMap<String, String>>,
    text: String,
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

/// A call as a reader has it at the end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    pub arguments: String,
}

/// Everything of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<Call>,
}

pub struct Case {
    pub name: String,
    pub spec: ParseSpec,
    pub text: String,
    pub expected: Message,
}

impl Message {
    /// Joins parts, and checks that calls come in order, each one whole before the next.
    pub fn new(parts: &[Part]) -> Self {
        let mut message = Self::default();
        for part in parts {
            match part {
                Part::Reasoning(text) => message.reasoning += text,
                Part::Content(text) => message.content += text,
                Part::ToolCall { index, name } => {
                    assert_eq!(*index as usize, message.calls.len(), "{parts:?}");
                    assert_ne!(name, "");
                    message.calls.push(Call {
                        name: name.clone(),
                        arguments: String::new(),
                    });
                }
                Part::Arguments { index, text } => {
                    assert_eq!(*index as usize + 1, message.calls.len(), "{parts:?}");
                    message.calls.last_mut().unwrap().arguments += text;
                }
            }
        }
        message
    }
}

pub fn spec(reasoning: Option<&str>, tools: Option<&str>) -> ParseSpec {
    ParseSpec {
        reasoning: reasoning.map(|name| ReasoningFormat::from_name(name).unwrap()),
        tools: tools.map(|name| ToolFormat::from_name(name).unwrap()),
        ..ParseSpec::default()
    }
}

/// All cases of the file.
pub fn all() -> Vec<Case> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/parser_cases.json"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let files: Vec<CaseFile> = serde_json::from_str(&text).unwrap();
    assert!(files.len() >= 70);
    files.into_iter().map(read).collect()
}

fn read(file: CaseFile) -> Case {
    let mut types = ToolTypes::default();
    for (function, parameters) in file.tool_types {
        for (parameter, kind) in parameters {
            let kind = ParameterType::from_name(&kind).unwrap();
            types.insert(function.clone(), parameter, kind);
        }
    }
    Case {
        spec: ParseSpec {
            in_reasoning: file.in_reasoning,
            tool_types: Arc::new(types),
            ..spec(
                file.reasoning_parser.as_deref(),
                file.tool_parser.as_deref(),
            )
        },
        name: file.name,
        text: file.text,
        expected: Message {
            reasoning: file.reasoning,
            content: file.content,
            calls: file.calls,
        },
    }
}

/// Parts of a text that comes in these pieces, each push read by itself and merged later.
pub fn parse_pieces<'a>(spec: &ParseSpec, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = Parser::new(spec);
    let (mut parts, mut all) = (Vec::new(), Vec::new());
    for piece in pieces {
        parser.push(piece, &mut parts);
        parts.drain(..).for_each(|part: Part| part.push(&mut all));
    }
    parser.finish(&mut parts);
    parts.drain(..).for_each(|part| part.push(&mut all));
    all
}

#[test]
fn every_case_gives_what_it_says() {
    let mut wrong = Vec::new();
    for case in all() {
        let message = Message::new(&parse(&case.spec, &case.text));
        if message != case.expected {
            wrong.push(format!(
                "{}\n  got  {message:?}\n  want {:?}",
                case.name, case.expected
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_format_has_cases() {
    let cases = all();
    for (name, format) in ToolFormat::ALL {
        let count = cases
            .iter()
            .filter(|case| case.spec.tools == Some(format))
            .count();
        assert!(count >= 5, "{name} has {count}");
        assert_eq!(ToolFormat::from_name(name), Some(format));
    }
    for (name, format) in ReasoningFormat::ALL {
        let count = cases
            .iter()
            .filter(|case| case.spec.reasoning == Some(format))
            .count();
        assert!(count >= 5, "{name} has {count}");
        assert_eq!(ReasoningFormat::from_name(name), Some(format));
    }
    assert_eq!(ToolFormat::from_name("Hermes"), None);
    assert_eq!(ReasoningFormat::from_name(""), None);
}
