//! Calls that the end of the answer cuts, where the answer can be nothing but calls.

use miniinfer_core::parse::{ParseSpec, parse};

use crate::cases::{Call, Message, parse_pieces, spec};

/// By format: an answer of calls as a grammar has it, and where its first call's name is known.
const ANSWERS: &[(&str, &str, &str)] = &[
    (
        "hermes",
        "<tool_call>\n{\"name\": \"roll\"",
        ", \"arguments\": {\"sides\": 6, \"note\": \"é日\"}}\n</tool_call>\n<tool_call>\n{\"name\": \
         \"stop\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=roll>",
        "\n<parameter=sides>\n6\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n\
         <function=stop>\n</function>\n</tool_call>",
    ),
    (
        "llama3_json",
        "{\"name\": \"roll\"",
        ", \"parameters\": {\"sides\": 6}}; {\"name\": \"stop\", \"parameters\": {}}",
    ),
    (
        "mistral",
        "[TOOL_CALLS] [{\"name\": \"roll\"",
        ", \"arguments\": {\"sides\": 6}}, {\"name\": \"stop\", \"arguments\": {}}]",
    ),
    (
        "mistral",
        "[TOOL_CALLS]roll[",
        "ARGS]{\"sides\": 6}[TOOL_CALLS]stop[ARGS]{}",
    ),
    ("pythonic", "[roll(", "sides=6, note=\"a\"), stop()]"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>roll\n",
        "```json\n{\"sides\": 6}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function\
         <｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary \
         to=functions.roll ",
        "<|constrain|>json<|message|>{\"sides\": 6}",
    ),
];

fn forced(tools: &str) -> ParseSpec {
    let reasoning = (tools == "gpt_oss").then_some(tools);
    ParseSpec {
        calls_only: true,
        ..spec(reasoning, Some(tools))
    }
}

#[test]
fn a_cut_answer_of_calls_has_no_content_and_calls_as_far_as_they_came() {
    for (format, head, tail) in ANSWERS {
        let spec = forced(format);
        let text = format!("{head}{tail}");
        let whole = Message::new(&parse(&spec, &text)).calls;
        assert!(whole.len() == 2 || *format == "gpt_oss", "{whole:?}");
        for (end, _) in text.char_indices() {
            let cut = &text[..end];
            let message = Message::new(&parse(&spec, cut));
            assert_eq!(message.content, "", "{format}: {cut}");
            assert_eq!(
                message.calls.is_empty(),
                end < head.len(),
                "{format}: {cut}"
            );
            for (call, all) in message.calls.iter().zip(&whole) {
                assert_eq!(call.name, all.name, "{format}: {cut}");
                let (came, comes) = (&call.arguments, &all.arguments);
                assert!(
                    comes.starts_with(came.as_str()),
                    "{format}: {came} of {comes}"
                );
            }
            let characters: Vec<String> = cut.chars().map(String::from).collect();
            let pieces = characters.iter().map(String::as_str);
            assert_eq!(Message::new(&parse_pieces(&spec, pieces)), message);
        }
    }
}

#[test]
fn a_call_that_is_cut_behind_its_name_has_no_arguments() {
    for (format, head, _) in ANSWERS {
        let roll = Call {
            name: "roll".into(),
            arguments: String::new(),
        };
        assert_eq!(Message::new(&parse(&forced(format), head)).calls, [roll]);
    }
}

#[test]
fn where_text_may_come_too_a_cut_call_stays_text() {
    for (format, head, _) in ANSWERS {
        // A coder's name has an end of its own, and a header's tags say nothing.
        if !["qwen3_coder", "gpt_oss"].contains(format) {
            let message = Message::new(&parse(&spec(None, Some(format)), head));
            assert_eq!((message.content.as_str(), message.calls.len()), (*head, 0));
        }
    }
}

#[test]
fn reasoning_in_channels_that_is_not_told_apart_is_not_left_out() {
    let spec = ParseSpec {
        calls_only: true,
        ..spec(None, Some("gpt_oss"))
    };
    let (_, head, _) = ANSWERS[ANSWERS.len() - 1];
    let message = Message::new(&parse(&spec, head));
    assert_eq!((message.content.as_str(), message.calls.len()), ("Hm.", 1));
}
