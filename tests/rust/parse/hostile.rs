//! Random texts made of what the formats are made of: no panic, bounded memory, nothing lost.

use miniinfer_core::parse::{
    ParameterType, ParseSpec, Parser, Part, ReasoningFormat, ToolFormat, ToolTypes,
    UNDECIDED_LIMIT, parse,
};
use proptest::prelude::*;

use crate::cases::{Message, parse_pieces, spec};

/// Twice what may be undecided (a call and its arguments before its name), and the tags' beginnings.
const HELD_LIMIT: usize = 2 * UNDECIDED_LIMIT + 1024;

const FRAGMENTS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_start|>",
    "<|python_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "assistant",
    "analysis",
    "commentary to=functions.f ",
    "final",
    "{\"name\": \"f\", \"arguments\": {",
    "\"name\"",
    "\"arguments\"",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    "\\",
    "\\u00",
    "\\ud83d",
    ":",
    ",",
    ";",
    "=",
    "f(a=",
    "[f(a='",
    "```json\n",
    "function",
    "null",
    "tru",
    "1.5e",
    "-",
    "\n",
    " ",
    "\t",
    "é",
    "日",
    "😀",
    "<",
    "</",
    "prose",
    "\0",
    "a",
    "type",
    "id",
];

fn fragment() -> impl Strategy<Value = String> {
    let whole = proptest::sample::select(FRAGMENTS);
    (whole, 0..4usize, 0.0..1.0f64).prop_map(|(text, cut, at)| {
        let mut end = (text.len() as f64 * at) as usize;
        while !text.is_char_boundary(end) {
            end += 1;
        }
        // One in four is cut short.
        if cut == 0 {
            text[..end].to_owned()
        } else {
            text.to_owned()
        }
    })
}

fn specs() -> Vec<ParseSpec> {
    let mut types = ToolTypes::default();
    types.insert("f".into(), "a".into(), ParameterType::String);
    let types = std::sync::Arc::new(types);
    let mut specs = Vec::new();
    for reasoning in [None]
        .into_iter()
        .chain(ReasoningFormat::ALL.map(|(_, format)| Some(format)))
    {
        for tools in [None]
            .into_iter()
            .chain(ToolFormat::ALL.map(|(_, format)| Some(format)))
        {
            specs.push(ParseSpec {
                reasoning,
                tools,
                tool_types: types.clone(),
                ..ParseSpec::default()
            });
        }
    }
    specs
}

fn without_blanks(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_whitespace()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn random_texts_are_read_alike_however_they_are_cut(
        fragments in proptest::collection::vec(fragment(), 0..40),
        special in proptest::collection::vec(proptest::sample::select(FRAGMENTS), 0..40),
        spec in proptest::sample::select(specs()),
    ) {
        let text = fragments.concat();
        let whole = parse(&spec, &text);
        prop_assert_eq!(&parse_pieces(&spec, fragments.iter().map(String::as_str)), &whole, "{:?} {}", spec, text);
        let characters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&parse_pieces(&spec, characters.iter().map(String::as_str)), &whole, "{:?} {}", spec, text);
        Message::new(&whole);

        // Special tokens in between: no panic, calls in order, and none of their text.
        let (mut parser, mut parts) = (Parser::new(&spec), Vec::new());
        for (text, marker) in fragments.iter().zip(&special) {
            parser.push(text, &mut parts);
            parser.push_marker(marker, &mut parts);
            prop_assert!(parser.held() <= HELD_LIMIT);
        }
        parser.finish(&mut parts);
        Message::new(&parts);
    }

    #[test]
    fn prose_is_never_lost(
        prose in proptest::collection::vec("[ -;=?-Z^-z|~é日\n]{0,20}", 0..6),
        spec in proptest::sample::select(specs()),
    ) {
        // No tag's first character: nothing but prose, whatever the formats.
        let text = prose.concat().replace(['[', '{', '<'], "(");
        let message = Message::new(&parse(&spec, &text));
        prop_assert_eq!(&message.calls, &[]);
        let said = if message.reasoning.is_empty() { message.content } else { message.reasoning };
        if spec.reasoning == Some(ReasoningFormat::DeepSeekR1) {
            prop_assert_eq!(said, text.trim_start_matches([' ', '\n']));
        } else {
            prop_assert_eq!(&said, &text);
        }
    }

    #[test]
    fn broken_calls_come_back_whole(fragments in proptest::collection::vec(fragment(), 0..20)) {
        // Where no call is found, and no channels, no character but blanks is lost.
        let text = fragments.concat();
        for (name, format) in ToolFormat::ALL {
            let message = Message::new(&parse(&spec(None, Some(name)), &text));
            if message.calls.is_empty() && format != ToolFormat::GptOss {
                prop_assert_eq!(without_blanks(&message.content), without_blanks(&text));
            }
        }
    }
}

/// Beginnings of every kind that a parser holds back, by format.
const OPENINGS: &[(&str, &[&str])] = &[
    (
        "hermes",
        &[
            "",
            "<tool_call>",
            "<tool_call>{\"",
            "<tool_call>{\"n\": ",
            "<tool_call>{\"name\": \"",
            "<tool_call>{\"arguments\": {\"a\": \"",
            "<tool_call>{\"arguments\": \"",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"",
            "<tool_call>{\"name\": \"f\", \"arguments\": {}, \"",
        ],
    ),
    (
        "llama3_json",
        &["{\"name\": \"", "{\"parameters\": {\"", "<|python_tag|>"],
    ),
    (
        "mistral",
        &[
            "[TOOL_CALLS]",
            "[TOOL_CALLS]f",
            "[TOOL_CALLS]f[CALL_ID]",
            "[TOOL_CALLS]f[ARGS]",
            "[TOOL_CALLS][{",
        ],
    ),
    (
        "pythonic",
        &["[", "[f(", "[f(a", "[f(a=", "[f(a='", "[f(a=[[", "[f(1"],
    ),
    (
        "qwen3_coder",
        &[
            "<tool_call>",
            "<function=",
            "<function=f>",
            "<function=f><parameter=",
            "<function=f><parameter=a>",
            "<function=f><parameter=b>{",
            "<function=f><parameter=b>1",
        ],
    ),
    (
        "deepseek_v3",
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        ],
    ),
    (
        "gpt_oss",
        &[
            "<|start|>",
            "<|channel|>",
            "<|channel|>commentary to=functions.f<|message|>",
        ],
    ),
];

#[test]
fn endless_texts_are_held_to_a_limit() {
    for (tools, openings) in OPENINGS {
        for opening in *openings {
            for filling in ["a", " ", "\n", "1", "[", "\\", "<", "é", "\"a\": 1, ", "t"] {
                let mut parser = Parser::new(&spec(Some("qwen3"), Some(tools)));
                let mut parts = Vec::new();
                parser.push(opening, &mut parts);
                let chunk = filling.repeat(UNDECIDED_LIMIT / 4 / filling.len());
                for _ in 0..5 {
                    parser.push(&chunk, &mut parts);
                    parts.clear();
                    let held = parser.held();
                    assert!(held <= HELD_LIMIT, "{tools} {opening} {filling}: {held}");
                }
            }
        }
    }
}

#[test]
fn a_call_that_never_gets_a_name_comes_back_at_the_limit() {
    let text = format!(
        "<tool_call>{{\"arguments\": \"{}",
        "a".repeat(UNDECIDED_LIMIT)
    );
    let mut parser = Parser::new(&spec(None, Some("hermes")));
    let mut parts = Vec::new();
    parser.push(&text, &mut parts);
    assert_eq!(parts, [Part::Content(text)]);
    assert_eq!(parser.held(), 0);
}

#[test]
fn deep_nesting_is_a_matter_of_counting() {
    let deep = "[".repeat(100_000);
    let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": {deep}");
    let message = Message::new(&parse(&spec(None, Some("hermes")), &text));
    assert_eq!(message.calls[0].arguments, format!("{{\"a\": {deep}"));
    let message = Message::new(&parse(
        &spec(None, Some("pythonic")),
        &format!("[f(a={deep}"),
    ));
    assert_eq!(message.calls[0].arguments, format!("{{\"a\": {deep}"));
    let text = format!("<function=f><parameter=a>{deep}</parameter></function>");
    let message = Message::new(&parse(&spec(None, Some("qwen3_coder")), &text));
    assert!(message.calls[0].arguments.starts_with("{\"a\": "));
}
