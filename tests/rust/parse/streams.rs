//! Parts out of token ids: special tokens, stop strings, limits, real vocabularies.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use miniinfer_core::parse::{ParseSpec, parse};
use miniinfer_core::text::{
    Delta, FinishReason, StopCause, StopToken, StreamSpec, TextModel, TextStream, TokenInput,
    Verdict,
};
use tokenizers::Tokenizer;

use crate::cases::{Case, Message, all, spec};

/// Every delta of these ids, and the end of the sequence where one is given.
fn stream(model: &Arc<TextModel>, ids: &[u32], eos: Option<u32>, spec: &StreamSpec) -> Vec<Delta> {
    let mut stream = TextStream::new(model.clone(), spec.clone()).unwrap();
    let mut deltas = Vec::new();
    for id in ids {
        let mut delta = Delta::default();
        let verdict = stream.push(&TokenInput::new(*id), &mut delta);
        deltas.push(delta);
        if verdict == Verdict::Stopped {
            return deltas;
        }
    }
    let mut delta = Delta::default();
    let (reason, token) = match eos {
        Some(id) => (
            FinishReason::Stop,
            Some(StopToken::EndOfSequence(TokenInput::new(id))),
        ),
        None => (FinishReason::Length, None),
    };
    stream.finish(reason, token, &mut delta);
    deltas.push(delta);
    deltas
}

fn joined(mut deltas: Vec<Delta>) -> Delta {
    let mut whole = Delta::default();
    for delta in &mut deltas {
        whole.merge_from(delta);
    }
    whole
}

fn skipping(parse: Option<ParseSpec>) -> StreamSpec {
    StreamSpec {
        skip_special_tokens: true,
        parse,
        ..StreamSpec::default()
    }
}

/// A model with a token for each piece, those of `special` marked so, and the ids of the pieces.
fn toy(pieces: &[&str], special: &[&str]) -> (Arc<TextModel>, Vec<u32>) {
    let is_special = |id: &u32| special.contains(&pieces[*id as usize]);
    let ids: Vec<u32> = (0..pieces.len() as u32).collect();
    let marked: Vec<u32> = ids.iter().copied().filter(is_special).collect();
    (TextModel::from_parts(pieces, &marked).unwrap(), ids)
}

#[test]
fn v18_tags_that_are_special_tokens_are_seen_and_never_shown() {
    let special = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|x|>"];
    let pieces = [
        "Hm ",
        "<|x|>",
        "<tool_call>",
        "{\"name\": \"f\", \"arguments\": {}}",
        "</tool_call>",
        " so",
        "[TOOL_CALLS]",
        "[{\"name\": \"f\", \"arguments\": {}}]",
        "<tool_call>",
        "no",
        "</tool_call>",
    ];
    let (model, ids) = toy(&pieces, &special);
    let plain = joined(stream(&model, &ids, None, &skipping(None)));
    assert_eq!(plain.parts, []);
    assert!(!plain.text.contains("tool_call") && !plain.text.contains("TOOL_CALLS"));
    for (tools, content) in [
        ("hermes", "Hm\nso[{\"name\": \"f\", \"arguments\": {}}]no"),
        ("mistral", "Hm {\"name\": \"f\", \"arguments\": {}} so\nno"),
    ] {
        let delta = joined(stream(
            &model,
            &ids,
            None,
            &skipping(Some(spec(None, Some(tools)))),
        ));
        let message = Message::new(&delta.parts);
        assert_eq!(message.calls.len(), 1, "{tools}");
        assert_eq!(message.calls[0].arguments, "{}");
        assert_eq!(message.content, content, "{tools}");
        assert_eq!(
            (&delta.text, &delta.token_ids),
            (&plain.text, &plain.token_ids)
        );
        // Where special tokens are wanted as text, they are text.
        let shown = StreamSpec {
            skip_special_tokens: false,
            ..skipping(Some(spec(None, Some(tools))))
        };
        let delta = joined(stream(&model, &ids, None, &shown));
        assert_eq!(delta.text, pieces.concat());
        assert_eq!(
            delta.parts,
            parse(&spec(None, Some(tools)), &pieces.concat())
        );
    }
}

#[test]
fn a_special_end_tag_ends_a_call_whose_string_has_no_end() {
    let pieces = [
        "<tool_call>",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"b",
        "</tool_call>",
        "c",
    ];
    let (model, ids) = toy(&pieces, &["<tool_call>", "</tool_call>"]);
    let spec = skipping(Some(spec(None, Some("hermes"))));
    let message = Message::new(&joined(stream(&model, &ids, None, &spec)).parts);
    assert_eq!(message.calls[0].arguments, "{\"a\": \"b");
    assert_eq!(message.content, "c");
}

#[test]
fn v9_the_text_of_the_end_token_is_in_no_part() {
    let (model, ids) = toy(&["plan", "<|eos|>"], &["<|eos|>"]);
    for reasoning in ["deepseek_r1", "qwen3"] {
        for skip_special_tokens in [true, false] {
            let spec = StreamSpec {
                skip_special_tokens,
                ..skipping(Some(spec(Some(reasoning), None)))
            };
            let message = Message::new(&joined(stream(&model, &ids[..1], Some(1), &spec)).parts);
            assert_eq!(message.reasoning + &message.content, "plan");
        }
    }
}

#[test]
fn v29_a_stop_string_ends_the_answer_while_it_thinks() {
    let pieces = ["a ", "so", "ng x", "</think>", "y"];
    let (model, ids) = toy(&pieces, &[]);
    for final_only in [false, true] {
        let spec = StreamSpec {
            stop: vec!["song".into()],
            final_only,
            ..skipping(Some(spec(Some("deepseek_r1"), None)))
        };
        let delta = joined(stream(&model, &ids, None, &spec));
        let message = Message::new(&delta.parts);
        assert_eq!(
            (message.reasoning.as_str(), message.content.as_str()),
            ("a ", "")
        );
        let finish = delta.finish.unwrap();
        assert_eq!(finish.reason, FinishReason::Stop);
        assert_eq!(finish.stop, StopCause::Text("song".into()));
    }
}

#[test]
fn a_tag_behind_a_stop_string_is_not_read() {
    let pieces = ["so", "[TOOL_CALLS]", "ng", "f[ARGS]{}"];
    let (model, ids) = toy(&pieces, &["[TOOL_CALLS]"]);
    let spec = StreamSpec {
        stop: vec!["song".into()],
        ..skipping(Some(spec(None, Some("mistral"))))
    };
    let delta = joined(stream(&model, &ids, None, &spec));
    assert_eq!((delta.parts, delta.text.as_str()), (vec![], ""));
}

#[test]
fn parts_come_as_soon_as_they_are_certain() {
    let pieces = [
        "<tool_call>",
        "{\"name\": \"f\",",
        " \"arguments\": {",
        "\"a\": 1",
        "}}",
        "</tool_call>",
    ];
    let (model, ids) = toy(&pieces, &[]);
    let deltas = stream(
        &model,
        &ids,
        None,
        &skipping(Some(spec(None, Some("hermes")))),
    );
    let counts: Vec<usize> = deltas.iter().map(|delta| delta.parts.len()).collect();
    assert_eq!(counts, [0, 0, 2, 1, 1, 0, 0]);
}

#[test]
fn the_limit_cuts_a_character_within_arguments() {
    let mut pieces: Vec<&[u8]> = vec![b"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \""];
    pieces.extend([&b"\xF0"[..], b"\x9F"]);
    let model = TextModel::from_parts(&pieces, &[]).unwrap();
    let spec = skipping(Some(spec(None, Some("hermes"))));
    let message = Message::new(&joined(stream(&model, &[0, 1, 2], None, &spec)).parts);
    assert_eq!(message.calls[0].arguments, "{\"a\": \"\u{FFFD}");
}

type Real = (String, Tokenizer, Arc<TextModel>);

/// The tokenizers of the folder named by `MINIINFER_TOKENIZERS` whose formats are parsed.
static REAL: LazyLock<Vec<Real>> = LazyLock::new(|| {
    let Some(folder) = std::env::var_os("MINIINFER_TOKENIZERS") else {
        println!("MINIINFER_TOKENIZERS is not set: toy vocabularies only");
        return Vec::new();
    };
    let names = ["qwen3", "llama3_1", "deepseek_v3", "gptoss", "mistral_nemo"];
    let load = |name: &str| {
        let path = PathBuf::from(&folder).join(name).join("tokenizer.json");
        let bytes = std::fs::read(path).unwrap();
        let model = TextModel::from_json(&bytes).unwrap();
        (
            name.to_owned(),
            Tokenizer::from_bytes(&bytes).unwrap(),
            model,
        )
    };
    names.map(load).into()
});

fn check(name: &str, tokenizer: &Tokenizer, model: &Arc<TextModel>, case: &Case) {
    let encoding = tokenizer.encode(case.text.as_str(), false).unwrap();
    let ids = encoding.get_ids();
    let shown = StreamSpec {
        skip_special_tokens: false,
        ..skipping(Some(case.spec.clone()))
    };
    let text = tokenizer.decode(ids, false).unwrap();
    let delta = joined(stream(model, ids, None, &shown));
    assert_eq!(delta.text, text);
    assert_eq!(
        delta.parts,
        parse(&case.spec, &text),
        "{name}, {}",
        case.name
    );
    // A special token is shown nowhere; what else there is to an answer is the same without them.
    let delta = joined(stream(model, ids, None, &skipping(Some(case.spec.clone()))));
    assert_eq!(delta.text, tokenizer.decode(ids, true).unwrap());
    let message = Message::new(&delta.parts);
    let specials = ids.iter().filter(|id| model.is_special(**id));
    let shown = format!("{:?}", case.expected);
    if specials
        .map(|id| model.token_text(*id).0)
        .all(|special| !shown.contains(&special))
    {
        assert_eq!(message, case.expected, "{name}, {}", case.name);
    }
}

#[test]
fn real_vocabularies_give_what_the_text_gives() {
    let cases = all();
    for (name, tokenizer, model) in REAL.iter() {
        for case in &cases {
            check(name, tokenizer, model, case);
        }
    }
}

#[test]
fn real_special_tags_are_found() {
    for (name, tokenizer, model) in REAL.iter() {
        let (tag, tools, text) = match name.as_str() {
            "mistral_nemo" => (
                "[TOOL_CALLS]",
                "mistral",
                "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]",
            ),
            "gptoss" => (
                "<|message|>",
                "gpt_oss",
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            ),
            _ => continue,
        };
        assert!(
            model.is_special(tokenizer.token_to_id(tag).unwrap()),
            "{name}"
        );
        let ids = tokenizer.encode(text, false).unwrap();
        let spec = skipping(Some(spec(None, Some(tools))));
        let message = Message::new(&joined(stream(model, ids.get_ids(), None, &spec)).parts);
        assert_eq!(
            (message.calls.len(), message.content.as_str()),
            (1, ""),
            "{name}"
        );
    }
}
