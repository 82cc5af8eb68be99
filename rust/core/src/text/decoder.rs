//! What a tokenizer says: the immutable half of detokenising, shared by all streams.

use std::borrow::Cow;
use std::sync::Arc;

use super::error::TextError;
use super::load::{self, Token};
use super::pieces::{Piece, Pieces};
use super::steps::{self, Plan, Shape, Step};

/// How the pieces of a text are joined.
pub(super) enum Join {
    /// One lossy UTF-8 text of all bytes.
    Bytes,
    /// Texts one after another; the steps apply to the text of a run of byte tokens.
    Text { after: Vec<Step> },
    /// A token's text depends on the token before it.
    Pairwise {
        steps: Vec<Step>,
        names: Vec<Option<Box<str>>>,
    },
    /// Only the whole can be decoded.
    Whole {
        steps: Vec<Step>,
        names: Vec<Option<Box<str>>>,
    },
}

/// The table of a tokenizer's tokens and the rule that joins them.
///
/// Immutable and cheap to share. Known decoders: byte-level (GPT-2, Llama 3, Qwen, `DeepSeek`,
/// gpt-oss), `SentencePiece` with and without byte fallback and leading-space removal (Llama 2,
/// Mistral, Gemma, T5), `WordPiece`, none at all: all of them one table look-up a token. Decoders
/// where a token's text depends on the one before it (BPE with an end-of-word suffix, CTC) go
/// through the tokenizers library two tokens at a time; a chain outside of these is decoded whole
/// at the end.
pub struct TextModel {
    rest: Pieces,
    /// Pieces at the start of a text, where they differ.
    first: Option<Pieces>,
    join: Join,
    strip: Option<(char, usize)>,
}

impl TextModel {
    /// Reads a `tokenizer.json` (Hugging Face tokenizers, version 1.0), given as its bytes.
    pub fn from_json(bytes: &[u8]) -> Result<Arc<Self>, TextError> {
        let parts = load::read(bytes)?;
        let Plan { shape, strip } = steps::plan(parts.decoder)?;
        let tokens = &parts.tokens;
        let (rest, first, join) = match shape {
            Shape::Bytes { local } => {
                let (rest, first) = local_pieces(tokens, &local, &[], Kind::Bytes)?;
                (rest, first, Join::Bytes)
            }
            Shape::Text {
                local,
                byte_fallback,
                after,
            } => {
                let kind = if byte_fallback {
                    Kind::TextOrByte
                } else {
                    Kind::Text
                };
                let (rest, first) = local_pieces(tokens, &local, &after, kind)?;
                (rest, first, Join::Text { after })
            }
            Shape::Pairwise(steps) => (
                alone_pieces(tokens, &steps)?,
                None,
                Join::Pairwise {
                    steps,
                    names: names(tokens),
                },
            ),
            Shape::Whole(steps) => (
                alone_pieces(tokens, &steps)?,
                None,
                Join::Whole {
                    steps,
                    names: names(tokens),
                },
            ),
        };
        Ok(Arc::new(Self {
            rest,
            first,
            join,
            strip,
        }))
    }

    /// A byte-level model of raw token bytes, for tests and benchmarks: token `i` says `tokens[i]`.
    pub fn from_parts<T: AsRef<[u8]>>(
        tokens: &[T],
        special: &[u32],
    ) -> Result<Arc<Self>, TextError> {
        let mut rest = Pieces::with_capacity(tokens.len());
        for (id, bytes) in tokens.iter().enumerate() {
            rest.push(&Piece::Text(bytes.as_ref()), special.contains(&(id as u32)))?;
        }
        Ok(Arc::new(Self {
            rest,
            first: None,
            join: Join::Bytes,
            strip: None,
        }))
    }

    /// Number of ids: the largest known id and one.
    pub fn vocabulary_size(&self) -> usize {
        self.rest.len()
    }

    /// Whether the tokenizer marks the id as special. False for an unknown id.
    pub fn is_special(&self, id: u32) -> bool {
        self.rest.is_special(id).unwrap_or(false)
    }

    /// What a token says by itself inside a text: as text, with U+FFFD for what is not UTF-8, and
    /// as bytes.
    ///
    /// Both are empty for an unknown id.
    pub fn token_text(&self, id: u32) -> (String, Vec<u8>) {
        let bytes = self.rest.bytes(id);
        (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec())
    }

    /// Whether each token has bytes of its own, whatever stands before it.
    pub(crate) fn has_own_bytes(&self) -> bool {
        matches!(self.join, Join::Bytes | Join::Text { .. })
    }

    /// The bytes of a token inside a text; none for an unknown id.
    pub(crate) fn own_bytes(&self, id: u32) -> &[u8] {
        self.rest.bytes(id)
    }

    pub(super) fn join(&self) -> &Join {
        &self.join
    }

    pub(super) fn strip(&self) -> Option<(char, usize)> {
        self.strip
    }

    /// `None` for an unknown id, else whether it is special.
    pub(super) fn known_special(&self, id: u32) -> Option<bool> {
        self.rest.is_special(id)
    }

    pub(super) fn piece(&self, id: u32, at_start: bool) -> Piece<'_> {
        match &self.first {
            Some(first) if at_start => first.piece(id),
            _ => self.rest.piece(id),
        }
    }
}

/// What the text of a token becomes.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// The bytes of GPT-2's byte alphabet.
    Bytes,
    /// Text as it is.
    Text,
    /// Text, or a byte for a token named `<0xNN>`.
    TextOrByte,
}

/// The pieces of all tokens inside a text, and those at its start where they differ.
fn local_pieces(
    tokens: &[Token],
    local: &[Step],
    after: &[Step],
    kind: Kind,
) -> Result<(Pieces, Option<Pieces>), TextError> {
    let positional = local.iter().chain(after).any(Step::is_positional);
    let rest = table(tokens, local, after, kind, false)?;
    let first = positional
        .then(|| table(tokens, local, after, kind, true))
        .transpose()?;
    Ok((rest, first))
}

fn table(
    tokens: &[Token],
    local: &[Step],
    after: &[Step],
    kind: Kind,
    at_start: bool,
) -> Result<Pieces, TextError> {
    let names: Vec<Cow<str>> = tokens
        .iter()
        .map(|token| Cow::Borrowed(token.name.as_deref().unwrap_or_default()))
        .collect();
    let texts = transform(local, names, at_start)?;
    let bytes: Vec<Option<u8>> = match kind {
        Kind::TextOrByte => texts.iter().map(|text| fallback_byte(text)).collect(),
        Kind::Bytes | Kind::Text => Vec::new(),
    };
    let texts = transform(after, texts, at_start)?;
    let mut pieces = Pieces::with_capacity(tokens.len());
    for (id, (token, text)) in tokens.iter().zip(texts).enumerate() {
        if token.name.is_none() {
            pieces.push_unknown();
        } else if let Some(&Some(byte)) = bytes.get(id) {
            pieces.push(&Piece::Byte(byte), token.special)?;
        } else if kind == Kind::Bytes {
            pieces.push(&Piece::Text(&steps::byte_level_bytes(&text)), token.special)?;
        } else {
            pieces.push(&Piece::Text(text.as_bytes()), token.special)?;
        }
    }
    pieces.shrink();
    Ok(pieces)
}

/// Runs local steps over every token: each at the start of a text, or each inside of one.
fn transform<'a>(
    steps: &[Step],
    texts: Vec<Cow<'a, str>>,
    at_start: bool,
) -> Result<Vec<Cow<'a, str>>, TextError> {
    if let [] | [Step::Replace { .. }] = steps {
        let Some(Step::Replace { from, to }) = steps.first() else {
            return Ok(texts);
        };
        let replaced = texts.into_iter().map(|text| {
            if text.contains(from.as_str()) {
                Cow::Owned(text.replace(from.as_str(), to))
            } else {
                text
            }
        });
        return Ok(replaced.collect());
    }
    let owned = texts.into_iter().map(Cow::into_owned);
    if !at_start {
        let texts =
            steps::run_chain_later(steps, owned.collect()).map_err(|error| refused(&error))?;
        return Ok(texts.into_iter().map(Cow::Owned).collect());
    }
    owned
        .map(|text| steps::run_chain(steps, vec![text]).map(|texts| Cow::Owned(texts.concat())))
        .collect::<tokenizers::Result<Vec<_>>>()
        .map_err(|error| refused(&error))
}

/// Each token decoded by itself: what there is to say about a token whose text depends on others.
fn alone_pieces(tokens: &[Token], steps: &[Step]) -> Result<Pieces, TextError> {
    let mut pieces = Pieces::with_capacity(tokens.len());
    for token in tokens {
        let Some(name) = &token.name else {
            pieces.push_unknown();
            continue;
        };
        let text = steps::run_chain(steps, vec![name.to_string()])
            .map_err(|error| refused(&error))?
            .concat();
        pieces.push(&Piece::Text(text.as_bytes()), token.special)?;
    }
    Ok(pieces)
}

fn names(tokens: &[Token]) -> Vec<Option<Box<str>>> {
    tokens
        .iter()
        .map(|token| token.name.as_deref().map(Box::from))
        .collect()
}

/// The byte of a token named `<0xNN>`, with the tokenizers library's idea of a hexadecimal number.
fn fallback_byte(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

fn refused(error: &dyn std::fmt::Display) -> TextError {
    TextError::Part {
        part: "decoder",
        message: error.to_string(),
    }
}
