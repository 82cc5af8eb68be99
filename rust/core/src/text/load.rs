//! Reads from `tokenizer.json` only what decoding needs: the vocabulary, the added tokens, the decoder.
//!
//! The merges are two thirds of such a file and say nothing about decoding; they are skipped without being stored.

use std::borrow::Cow;
use std::fmt;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::{NormalizedString, Normalizer};

use super::error::TextError;

/// The largest token id accepted: sixteen times the largest vocabulary published so far.
const MAX_TOKEN_ID: u32 = (1 << 22) - 1;

/// What one token id is called, and whether it is a special token.
#[derive(Clone, Default)]
pub(super) struct Token<'a> {
    pub(super) name: Option<Cow<'a, str>>,
    pub(super) special: bool,
}

/// The parts of a tokenizer that decoding reads; `tokens` is indexed by id.
pub(super) struct TokenizerParts<'a> {
    pub(super) tokens: Vec<Token<'a>>,
    pub(super) decoder: Option<Value>,
}

#[derive(Deserialize)]
struct TokenizerFile<'a> {
    #[serde(borrow, default)]
    added_tokens: Vec<AddedToken<'a>>,
    #[serde(default)]
    normalizer: Option<Value>,
    #[serde(default)]
    decoder: Option<Value>,
    #[serde(borrow)]
    model: ModelSection<'a>,
}

#[derive(Deserialize)]
struct AddedToken<'a> {
    #[serde(borrow)]
    content: Cow<'a, str>,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    normalized: bool,
}

#[derive(Deserialize)]
struct ModelSection<'a> {
    #[serde(borrow)]
    vocab: Vocabulary<'a>,
}

/// Token and id, in the order of the file.
struct Vocabulary<'a>(Vec<(Cow<'a, str>, u32)>);

/// A string that borrows from the file where it holds no escapes.
struct Name<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = Name<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a token")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Name(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Name(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Vocabulary<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabularyVisitor;
        impl<'de> Visitor<'de> for VocabularyVisitor {
            type Value = Vocabulary<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a map of token to id, or a list of [token, score]")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, id)) = map.next_entry::<Name<'de>, u32>()? {
                    pairs.push((name.0, id));
                }
                Ok(Vocabulary(pairs))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, _score)) = list.next_element::<(Name<'de>, f64)>()? {
                    pairs.push((name.0, pairs.len() as u32));
                }
                Ok(Vocabulary(pairs))
            }
        }
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

/// Reads the bytes of a `tokenizer.json`.
pub(super) fn read(bytes: &[u8]) -> Result<TokenizerParts<'_>, TextError> {
    let file: TokenizerFile = serde_json::from_slice(bytes)?;
    let added = place_added_tokens(&file.added_tokens, &file.model.vocab.0);
    let special: FxHashSet<&str> = file
        .added_tokens
        .iter()
        .filter(|token| token.special)
        .map(|token| token.content.as_ref())
        .collect();
    let normalizer = file
        .normalizer
        .filter(|_| file.added_tokens.iter().any(|token| token.normalized))
        .map(serde_json::from_value::<NormalizerWrapper>)
        .transpose()
        .map_err(|error| normalizer_error(&error))?;

    let mut tokens = Vec::with_capacity(file.model.vocab.0.len() + added.len());
    for (name, id) in file.model.vocab.0 {
        place(&mut tokens, id, name, &special)?;
    }
    for (token, id) in file.added_tokens.iter().zip(added) {
        let Some(id) = id else { continue };
        let name = match &normalizer {
            Some(normalizer) if token.normalized => normalized(normalizer, &token.content)?,
            _ => token.content.to_string(),
        };
        place(&mut tokens, id, Cow::Owned(name), &special)?;
    }
    Ok(TokenizerParts {
        tokens,
        decoder: file.decoder,
    })
}

/// The id of each added token: the vocabulary's where it has the token, else the next one after the vocabulary.
///
/// The `id` in the file is not read, as the tokenizers library does not read it either. `None`: an empty token.
fn place_added_tokens(added: &[AddedToken], vocabulary: &[(Cow<str>, u32)]) -> Vec<Option<u32>> {
    let mut known: FxHashMap<&str, Option<u32>> = added
        .iter()
        .map(|token| (token.content.as_ref(), None))
        .collect();
    for (name, id) in vocabulary {
        if let Some(slot) = known.get_mut(name.as_ref()) {
            *slot = Some(*id);
        }
    }
    let mut next_id = vocabulary.len() as u32;
    let mut ids = Vec::with_capacity(added.len());
    for token in added {
        let slot = known.entry(token.content.as_ref()).or_default();
        if slot.is_none() && !token.content.is_empty() {
            *slot = Some(next_id);
            next_id += 1;
        }
        ids.push(slot.filter(|_| !token.content.is_empty()));
    }
    ids
}

fn place<'a>(
    tokens: &mut Vec<Token<'a>>,
    id: u32,
    name: Cow<'a, str>,
    special: &FxHashSet<&str>,
) -> Result<(), TextError> {
    if id > MAX_TOKEN_ID {
        return Err(TextError::IdTooLarge {
            id,
            token: name.into_owned(),
            limit: MAX_TOKEN_ID,
        });
    }
    let index = id as usize;
    if index >= tokens.len() {
        tokens.resize(index + 1, Token::default());
    }
    tokens[index] = Token {
        special: special.contains(name.as_ref()),
        name: Some(name),
    };
    Ok(())
}

/// The library decodes an added token with `normalized: true` as its normalized form.
fn normalized(normalizer: &NormalizerWrapper, content: &str) -> Result<String, TextError> {
    let mut text = NormalizedString::from(content);
    normalizer
        .normalize(&mut text)
        .map_err(|error| normalizer_error(&error))?;
    Ok(text.get().to_owned())
}

fn normalizer_error(error: &dyn fmt::Display) -> TextError {
    TextError::Part {
        part: "normalizer",
        message: error.to_string(),
    }
}
