//! The model's tokens as byte strings, in the form that grammars walk over.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::error::{GrammarError, one_line};
use crate::text::TextModel;

/// Tokens longer than this are left out, so that no grammar allows them; the trie's nodes count to 1024.
const MAX_TOKEN_BYTES: usize = 1000;

/// What a grammar may cost. A lexer state takes one to two kilobytes, a thousand steps of fuel some 20
/// microseconds to compile and 70 to run.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        max_lexer_states: 50_000,
        max_grammar_size: 300_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// The tokens of one model: their trie, and which of them end an answer.
pub struct Vocabulary {
    factory: ParserFactory,
    size: u32,
    /// Mask of the tokens that begin with a digit.
    digits: Box<[u32]>,
}

impl Vocabulary {
    /// The tokens below `size` of a tokenizer; those of `eos` end an answer. Takes a tenth of a second or
    /// more for a large vocabulary.
    pub fn new(model: &TextModel, size: u32, eos: &[u32]) -> Result<Arc<Self>, GrammarError> {
        let eos: Vec<u32> = eos.iter().copied().filter(|&id| id < size).collect();
        let Some(&first) = eos.first() else {
            let reason = "it has no end-of-sequence token".into();
            return Err(GrammarError::Vocabulary { reason });
        };
        if !model.has_own_bytes() {
            let reason = "the text of its tokens depends on the tokens beside them".into();
            return Err(GrammarError::Vocabulary { reason });
        }
        let words: Vec<Vec<u8>> = (0..size).map(|id| word(model, id)).collect();
        let mut digits = vec![0; size.div_ceil(32) as usize];
        for (id, word) in words.iter().enumerate() {
            if word.first().is_some_and(u8::is_ascii_digit) {
                digits[id / 32] |= 1 << (id % 32);
            }
        }
        let factory = catch_unwind(AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&eos);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            ParserFactory::new_simple(&env).map_err(|error| error.to_string())
        }));
        let mut factory = factory
            .unwrap_or_else(|_| Err("its tokens form no trie".into()))
            .map_err(|reason| GrammarError::Vocabulary {
                reason: one_line(&reason),
            })?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Arc::new(Self {
            factory,
            size,
            digits: digits.into(),
        }))
    }

    /// Number of ids.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Words of a mask.
    pub fn num_words(&self) -> usize {
        self.size.div_ceil(32) as usize
    }

    /// Mask of the tokens that begin with a digit.
    pub(super) fn digits(&self) -> &[u32] {
        &self.digits
    }

    /// The bytes of a token; those of a special one begin with 0xFF, which no text holds.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        self.factory.tok_env().tok_trie().token(token)
    }

    /// A matcher at the start of a grammar.
    pub(super) fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let parser = self.factory.create_parser(grammar);
        let mut matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(error),
            None => {
                // Refuses what the lexer cannot even begin with.
                matcher
                    .compute_mask_or_eos()
                    .map_err(|error| error.to_string())?;
                Ok(matcher)
            }
        }
    }
}

/// What a token stands for in the trie: nothing for unknown ones, which are then never allowed.
fn word(model: &TextModel, id: u32) -> Vec<u8> {
    let bytes = model.own_bytes(id);
    if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES {
        Vec::new()
    } else if model.is_special(id) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
    } else {
        bytes.to_vec()
    }
}
