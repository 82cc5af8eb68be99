//! What forbids a request some of the tokens.

use std::cell::Cell;
use std::sync::Arc;

use super::allows;
use super::bad_words::BadWords;
use super::compiler::CompiledGrammar;
use super::cursor::Cursor;

/// What a request may not, or may only, generate.
#[derive(Clone, Debug, Default)]
pub struct TokenLimits {
    /// The answer follows this grammar.
    pub grammar: Option<Arc<CompiledGrammar>>,
    /// The grammar begins once these ids were generated one after the other; at once if there are none.
    pub grammar_after: Vec<u32>,
    /// Only these ids may be generated.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Sequences that may not be generated.
    pub bad_words: BadWords,
}

/// What one choice of a request may generate, as far as a mask says it.
pub(crate) enum Limit {
    /// The same tokens at each place.
    Allowed(Arc<[u32]>),
    /// What a grammar allows, once these ids have come.
    Grammar {
        cursor: Arc<Cursor>,
        after: Box<[u32]>,
    },
}

/// What a generated token means for a limit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The answer goes on.
    Continue,
    /// The token ends the answer, and the grammar agrees.
    Complete,
}

impl Limit {
    /// The limit of a choice at its start; `None` if a mask has nothing to say.
    pub(crate) fn new(limits: &TokenLimits) -> Option<Self> {
        if let Some(grammar) = &limits.grammar {
            let cursor = Arc::new(Cursor::new(grammar.clone()));
            let after = limits.grammar_after.as_slice().into();
            return Some(Self::Grammar { cursor, after });
        }
        let ids = limits.allowed_token_ids.as_ref()?;
        let words = ids.iter().max().map_or(0, |&id| id as usize / 32 + 1);
        let mut mask = vec![0; words];
        for id in ids {
            mask[*id as usize / 32] |= 1 << (id % 32);
        }
        Some(Self::Allowed(mask.into()))
    }

    /// Whether the next token is limited.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Allowed(_) => true,
            Self::Grammar { after, .. } => after.is_empty(),
        }
    }

    /// What there is to compute for the next mask.
    pub(crate) fn work(&self) -> Option<&Arc<Cursor>> {
        match self {
            Self::Grammar { cursor, after } if after.is_empty() => Some(cursor),
            _ => None,
        }
    }

    /// Writes the next token's mask, less the tokens of `banned` unless none would be left.
    pub(crate) fn write(&self, row: &[Cell<i32>], banned: impl Iterator<Item = u32>) {
        // Of a grammar that cannot be followed nothing is allowed: its request ends when the token comes.
        let mask = self.mask().unwrap_or_default();
        let fill = || {
            for (at, cell) in row.iter().enumerate() {
                cell.set(mask.get(at).copied().unwrap_or_default().cast_signed());
            }
        };
        fill();
        let mut bans = false;
        for id in banned {
            if let Some(cell) = row.get(id as usize / 32) {
                cell.set(cell.get() & !(1 << (id % 32)));
                bans = true;
            }
        }
        if bans && row.iter().all(|cell| cell.get() == 0) {
            fill();
        }
    }

    /// Takes note of a generated token, the last of `output`, where `ends` says whether it is one that ends
    /// answers. Fails for a token that is not allowed.
    pub(crate) fn accept(&mut self, output: &[u32], ends: bool) -> Result<Verdict, String> {
        let token = output[output.len() - 1];
        if self.is_open() {
            let mask = self
                .mask()
                .map_err(|reason| format!("the grammar cannot be followed: {reason}"))?;
            if !allows(&mask, token) {
                return Err(
                    "the model gave every token that is allowed here a probability of 0".into(),
                );
            }
        }
        if let Self::Grammar { cursor, after } = self {
            if !after.is_empty() {
                if output.ends_with(after) {
                    *after = Box::default();
                }
            } else if ends {
                return Ok(Verdict::Complete);
            } else {
                cursor.advance(token);
            }
        }
        Ok(Verdict::Continue)
    }

    fn mask(&self) -> Result<Arc<[u32]>, Arc<str>> {
        match self {
            Self::Allowed(mask) => Ok(mask.clone()),
            Self::Grammar { cursor, .. } => cursor.mask(),
        }
    }
}
