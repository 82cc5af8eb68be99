//! Cases that broke other servers; each name says what went wrong there.

use miniinfer_core::parse::{Part, parse};

use crate::cases::{Call, Message, parse_pieces, spec};

const PROSE_AROUND_CALLS: &str = "One sec.\n<tool_call>\n{\"name\": \"roll\", \"arguments\": \
    {\"sides\": 6}}\n</tool_call>\nthen\n<tool_call>\n{\"name\": \"roll\", \"arguments\": \
    {\"sides\": 20}}\n</tool_call>\nok?";

fn call(name: &str, arguments: &str) -> Call {
    Call {
        name: name.into(),
        arguments: arguments.into(),
    }
}

/// Parts with the formats given, which must not depend on the pieces.
fn parts(reasoning: Option<&str>, tools: Option<&str>, pieces: &[&str]) -> Vec<Part> {
    let spec = spec(reasoning, tools);
    let parts = parse_pieces(&spec, pieces.iter().copied());
    assert_eq!(parts, parse(&spec, &pieces.concat()), "{pieces:?}");
    parts
}

fn message(reasoning: Option<&str>, tools: Option<&str>, pieces: &[&str]) -> Message {
    Message::new(&parts(reasoning, tools, pieces))
}

fn hermes(pieces: &[&str]) -> Message {
    message(None, Some("hermes"), pieces)
}

fn content(text: &str) -> Message {
    Message {
        content: text.into(),
        ..Message::default()
    }
}

#[test]
fn v10_the_last_brackets_of_arguments_come_whatever_chunk_they_share() {
    let head = "<tool_call>\n{\"name\": \"put\", \"arguments\": {\"a\": {\"b\": {\"c\": 1";
    for tail in [
        &["}}, \"ok\": true}}\n</tool_call>"][..],
        &["}}, \"ok\": true", "}}\n</tool_call>"],
        &["}}, \"ok\": true}}\n", "</tool_call>"],
    ] {
        let pieces: Vec<&str> = [head].into_iter().chain(tail.iter().copied()).collect();
        let arguments = r#"{"a": {"b": {"c": 1}}, "ok": true}"#;
        assert_eq!(hermes(&pieces).calls, [call("put", arguments)]);
    }
}

#[test]
fn v11_an_unbalanced_bracket_in_a_string_is_a_character_like_any_other() {
    let text =
        r#"<tool_call>{"name": "sh", "arguments": {"cmd": "mkdir -p out/{a,b"}}</tool_call>"#;
    let message = hermes(&[text]);
    assert_eq!(
        message.calls,
        [call("sh", r#"{"cmd": "mkdir -p out/{a,b"}"#)]
    );
    assert_eq!(message.content, "");
}

#[test]
fn v12_prose_around_calls_is_kept_and_in_order() {
    let whole = parts(None, Some("hermes"), &[PROSE_AROUND_CALLS]);
    let kinds: Vec<&str> = whole.iter().map(kind).collect();
    let expected = "content call arguments content call arguments content";
    assert_eq!(kinds.join(" "), expected);
    assert_eq!(Message::new(&whole).content, "One sec.\nthen\nok?");
    for (at, tag) in PROSE_AROUND_CALLS.match_indices("tool_call>") {
        let (before, after) = PROSE_AROUND_CALLS.split_at(at + tag.len());
        assert_eq!(parts(None, Some("hermes"), &[before, after]), whole);
    }
}

fn kind(part: &Part) -> &'static str {
    match part {
        Part::Reasoning(_) => "reasoning",
        Part::Content(_) => "content",
        Part::ToolCall { .. } => "call",
        Part::Arguments { .. } => "arguments",
    }
}

#[test]
fn v13_the_start_of_a_tag_never_leaks_and_never_vanishes() {
    let cut = hermes(&["<tool", "_call>", "{\"name\": \"f\"}", "</tool", "_call>"]);
    assert_eq!((cut.content.as_str(), cut.calls.len()), ("", 1));
    assert_eq!(hermes(&["x <", " y"]), content("x < y"));
    assert_eq!(
        hermes(&["Working ", "<tool", "_ca"]),
        content("Working <tool_ca")
    );
}

#[test]
fn v14_two_calls_of_one_function_have_two_indices() {
    let indices = parts(None, Some("hermes"), &[PROSE_AROUND_CALLS]);
    let indices: Vec<u32> = indices.iter().filter_map(index).collect();
    assert_eq!(indices, [0, 0, 1, 1]);
}

fn index(part: &Part) -> Option<u32> {
    match part {
        Part::ToolCall { index, .. } | Part::Arguments { index, .. } => Some(*index),
        Part::Reasoning(_) | Part::Content(_) => None,
    }
}

#[test]
fn v15_a_name_is_given_once_and_whole() {
    let text = PROSE_AROUND_CALLS
        .chars()
        .map(String::from)
        .collect::<Vec<_>>();
    let pieces: Vec<&str> = text.iter().map(String::as_str).collect();
    let names: Vec<Part> = parts(None, Some("hermes"), &pieces)
        .into_iter()
        .filter(|part| matches!(part, Part::ToolCall { .. }))
        .collect();
    let name = |index| Part::ToolCall {
        index,
        name: "roll".into(),
    };
    assert_eq!(names, [name(0), name(1)]);
}

#[test]
fn v16_an_array_of_calls_streams_whole_numbers() {
    let pieces = [
        r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3, "b": 4"#,
        "1}}]",
    ];
    let message = message(None, Some("mistral"), &pieces);
    assert_eq!(message.calls, [call("add", r#"{"a": 3, "b": 41}"#)]);
}

#[test]
fn v17_a_tag_alone_in_a_delta_is_neither_name_nor_argument() {
    let once = [
        "[TOOL_CALLS]",
        "get_time",
        "[ARGS]",
        r#"{"tz": "#,
        r#""UTC"}"#,
    ];
    let twice = [once, once].concat();
    let message = message(None, Some("mistral"), &twice);
    let expected = call("get_time", r#"{"tz": "UTC"}"#);
    assert_eq!(message.calls, [expected.clone(), expected]);
    assert_eq!(message.content, "");
}

#[test]
fn v19_prose_may_follow_a_call_in_plain_json() {
    let text =
        "{\"type\": \"function\", \"name\": \"list_open\", \"parameters\": {}}\n\nNeed more?";
    let message = message(None, Some("llama3_json"), &[text]);
    assert_eq!(message.calls, [call("list_open", "{}")]);
    assert_eq!(message.content, "Need more?");
}

#[test]
fn v20_a_call_does_not_end_at_its_first_closing_bracket() {
    let arguments = r#"{"q": "x", "filters": {"range": {"min": 1, "max": 9}}}"#;
    let text = format!("<|python_tag|>{{\"name\": \"find\", \"parameters\": {arguments}}}");
    let message = message(None, Some("llama3_json"), &[&text]);
    assert_eq!(message.calls, [call("find", arguments)]);
    assert_eq!(message.content, "");
}

#[test]
fn v21_a_draft_in_the_reasoning_is_no_call() {
    let draft =
        "Maybe <tool_call>{\"name\": \"put\", \"arguments\": {\"k\": 1}}</tool_call> first?";
    let real = "\n<tool_call>\n{\"name\": \"put\", \"arguments\": {\"k\": 2}}\n</tool_call>";
    for reasoning in ["qwen3", "deepseek_r1"] {
        let pieces = ["<think>", draft, "</think>", real];
        let message = message(Some(reasoning), Some("hermes"), &pieces);
        assert_eq!(message.reasoning, draft);
        assert_eq!(message.calls, [call("put", "{\"k\": 2}")]);
        assert_eq!(message.content, "");
    }
}

#[test]
fn v24_broken_json_is_text_and_no_error() {
    let broken = [
        (r#"{"p": "C:\users\me"}"#, r#"{"p": "C:\users\me"}"#),
        ("{oops}", "{oops}"),
    ];
    for (arguments, expected) in broken {
        let text = format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}");
        let message = hermes(&[&text, "}\n</tool_call>"]);
        assert_eq!(message.calls, [call("f", expected)]);
        assert_eq!(message.content, "");
    }
    let nameless = "<tool_call>\n{\"arguments\": {\"a\": 1}}\n</tool_call>";
    assert_eq!(hermes(&[nameless]), content(nameless));
}

#[test]
fn v25_a_closing_tag_alone_ends_reasoning_that_the_prompt_opened() {
    let mut opened = spec(Some("qwen3"), None);
    opened.in_reasoning = Some(true);
    let r1 = spec(Some("deepseek_r1"), None);
    for spec in [opened, r1] {
        for text in ["plan\n</think>\n\nHi", "<think>\nplan\n</think>\n\nHi"] {
            let message = Message::new(&parse(&spec, text));
            assert_eq!(
                (message.reasoning.as_str(), message.content.as_str()),
                ("plan", "Hi")
            );
        }
    }
}

#[test]
fn v26_an_answer_without_thinking_is_content() {
    assert_eq!(message(Some("qwen3"), None, &["1", "2"]), content("12"));
    for reasoning in ["qwen3", "deepseek_r1"] {
        let mut closed = spec(Some(reasoning), None);
        closed.in_reasoning = Some(false);
        assert_eq!(
            Message::new(&parse_pieces(&closed, ["1", "2"])),
            content("12")
        );
    }
}

#[test]
fn v27_a_partial_tag_at_the_end_is_text() {
    for text in ["<", "hello <", "hello </thi"] {
        assert_eq!(
            message(Some("qwen3"), Some("hermes"), &[text]),
            content(text)
        );
    }
    let cut = message(Some("qwen3"), None, &["<think>", "cut off </thi"]);
    assert_eq!(
        (cut.reasoning.as_str(), cut.content.as_str()),
        ("cut off </thi", "")
    );
}

#[test]
fn v28_no_tag_shows() {
    let message = message(
        Some("qwen3"),
        None,
        &["<think>", "\n", "ok", "</think>", "Yes"],
    );
    assert_eq!(
        (message.reasoning.as_str(), message.content.as_str()),
        ("ok", "Yes")
    );
}
