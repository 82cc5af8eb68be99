//! A vocabulary for tests: every byte, some words, two special tokens; and ways to follow a grammar over it.

use std::sync::Arc;

use super::allows;
use super::compiler::{CompiledGrammar, GrammarCompiler};
use super::cursor::Cursor;
use super::spec::{GrammarSource, GrammarSpec, Whitespace};
use crate::text::TextModel;

/// Ends answers.
pub(super) const END: u32 = 256;

/// Special, but ends nothing.
pub(super) const CALL: u32 = 257;

/// Tokens of several bytes, from id 258 on.
pub(super) const WORDS: [&str; 12] = [
    "{\"", "\":", "\"}", "true", "false", "null", "12", "00000000", "\n    ", "    ", "name",
    "</think>",
];

/// Id of a token of several bytes.
pub(super) fn word(text: &str) -> u32 {
    let at = WORDS.iter().position(|word| *word == text);
    258 + at.expect("a word of the vocabulary") as u32
}

/// What a token says; nothing for a special one.
pub(super) fn bytes_of(token: u32) -> Vec<u8> {
    match token {
        0..256 => vec![token as u8],
        258.. => WORDS[token as usize - 258].into(),
        _ => Vec::new(),
    }
}

pub(super) fn byte_compiler() -> GrammarCompiler {
    let bytes = (0..=255).map(|byte| vec![byte]);
    let special = ["<|end|>", "<|call|>"].map(|name| name.as_bytes().to_vec());
    let words = WORDS.map(|word| word.as_bytes().to_vec());
    let tokens: Vec<Vec<u8>> = bytes.chain(special).chain(words).collect();
    let model = TextModel::from_parts(&tokens, &[END, CALL]).expect("a small vocabulary");
    GrammarCompiler::new(model, tokens.len() as u32, vec![END])
}

pub(super) fn spec(source: GrammarSource) -> GrammarSpec {
    GrammarSpec {
        source,
        whitespace: Whitespace::Bounded,
    }
}

pub(super) fn schema(text: &str) -> GrammarSource {
    GrammarSource::JsonSchema(text.into())
}

pub(super) fn compiled(source: GrammarSource) -> Arc<CompiledGrammar> {
    let named = format!("{source:?}");
    byte_compiler().compile(&spec(source)).expect(&named)
}

pub(super) fn refusal(source: GrammarSource) -> String {
    let named = format!("{source:?}");
    let refused = byte_compiler().compile(&spec(source));
    refused.map(|_| ()).expect_err(&named).to_string()
}

pub(super) fn allowed(cursor: &Cursor) -> Vec<u32> {
    let mask = cursor.mask().expect("a mask");
    (0..32 * mask.len() as u32)
        .filter(|&id| allows(&mask, id))
        .collect()
}

/// Follows a grammar by a rule that chooses among the allowed tokens, until it ends or so many have come.
pub(super) fn walk(
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

pub(super) fn ascii(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.bytes().map(u32::from)
}
