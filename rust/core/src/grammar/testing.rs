//! A vocabulary for tests: every byte, some words, two special tokens.

use super::compiler::GrammarCompiler;
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
