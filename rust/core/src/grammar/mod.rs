//! Answers of a given form: grammars over the bytes of tokens, and the sets of tokens that they allow.
//!
//! * [`GrammarSpec`]: what is asked for: a JSON schema, a regular expression, choices, a Lark grammar.
//! * [`GrammarCompiler`]: makes a [`CompiledGrammar`] of it, on the thread that submits.
//! * [`TokenLimits`]: everything that forbids a request some of the tokens.
//! * [`Cursor`]: where one answer stands in its grammar; its mask is computed beside the forward pass.
//!
//! A mask has one bit for each id of the vocabulary, 32 to a word, the lowest id in the lowest bit; a set
//! bit allows the token. The grammars themselves are those of the `llguidance` crate.

mod bad_words;
mod cache;
mod compiler;
mod cursor;
mod digits;
mod error;
#[cfg(test)]
mod hostile_tests;
mod limits;
mod numbers;
mod spec;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod vocabulary;
mod workers;

pub use bad_words::BadWords;
pub use compiler::{CompiledGrammar, GrammarCompiler};
pub use cursor::Cursor;
pub use error::GrammarError;
pub use limits::TokenLimits;
pub use spec::{GrammarSource, GrammarSpec, Whitespace};
pub use vocabulary::Vocabulary;

pub(crate) use limits::{Limit, Verdict};
pub(crate) use workers::MaskWorkers;

/// Words of a mask: one bit for each id of a vocabulary, 32 to a word.
pub fn mask_words(vocab_size: u32) -> usize {
    vocab_size.div_ceil(32) as usize
}

/// Whether a mask allows a token.
pub(crate) fn allows(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32)
        .is_some_and(|word| word & (1 << (token % 32)) != 0)
}
