//! What a request may generate, on the wire. A grammar goes as what it is compiled from.

use std::sync::Arc;

use super::error::WireError;
use super::pack::Packer;
use super::unpack::Unpacker;
use crate::grammar::{
    BadWords, CompiledGrammar, GrammarSource, GrammarSpec, TokenLimits, Whitespace,
};

/// Makes a grammar of what came through.
pub type Compile<'a> = dyn Fn(&GrammarSpec) -> Result<Arc<CompiledGrammar>, WireError> + 'a;

// Kinds of grammars; `NONE` is no grammar.
const NONE: u64 = 0;
const JSON_OBJECT: u64 = 1;
const JSON_SCHEMA: u64 = 2;
const REGEX: u64 = 3;
const CHOICE: u64 = 4;
const LARK: u64 = 5;

// Kinds of white space.
const BOUNDED: u64 = 0;
const COMPACT: u64 = 1;
const PATTERN: u64 = 2;

/// Appends the limits.
pub(super) fn pack_limits(limits: &TokenLimits, packer: &mut Packer<'_>) {
    packer.array(4);
    match &limits.grammar {
        Some(grammar) => pack_grammar(grammar.spec(), packer),
        None => packer.uint(NONE),
    }
    packer.column(limits.grammar_after.iter());
    match &limits.allowed_token_ids {
        Some(ids) => packer.column(ids.iter()),
        None => packer.nil(),
    }
    packer.array(limits.bad_words.len());
    for ids in limits.bad_words.sequences() {
        packer.column(ids.iter());
    }
}

fn pack_grammar(spec: &GrammarSpec, packer: &mut Packer<'_>) {
    let (kind, texts) = match &spec.source {
        GrammarSource::JsonObject => (JSON_OBJECT, [].as_slice()),
        GrammarSource::JsonSchema(text) => (JSON_SCHEMA, std::slice::from_ref(text)),
        GrammarSource::Regex(text) => (REGEX, std::slice::from_ref(text)),
        GrammarSource::Choice(texts) => (CHOICE, texts.as_slice()),
        GrammarSource::Lark(text) => (LARK, std::slice::from_ref(text)),
    };
    packer.uint(kind);
    packer.array(texts.len());
    for text in texts {
        packer.str(text);
    }
    let (kind, pattern) = match &spec.whitespace {
        Whitespace::Bounded => (BOUNDED, ""),
        Whitespace::Compact => (COMPACT, ""),
        Whitespace::Pattern(pattern) => (PATTERN, pattern.as_str()),
    };
    packer.uint(kind);
    packer.str(pattern);
}

/// Reads limits, their grammar compiled.
pub(super) fn unpack_limits(
    unpacker: &mut Unpacker<'_>,
    compile: &Compile<'_>,
) -> Result<TokenLimits, WireError> {
    unpacker.fields("limits", 4)?;
    let grammar = unpack_grammar(unpacker)?.map(|spec| compile(&spec));
    let mut limits = TokenLimits {
        grammar: grammar.transpose()?,
        ..TokenLimits::default()
    };
    unpacker.column("structured_outputs", &mut limits.grammar_after)?;
    if !unpacker.nil() {
        let mut ids = Vec::new();
        unpacker.column("allowed_token_ids", &mut ids)?;
        limits.allowed_token_ids = Some(ids);
    }
    let words = (0..unpacker.array(1)?).map(|_| {
        let mut ids = Vec::new();
        unpacker.column("bad_words", &mut ids).map(|()| ids)
    });
    limits.bad_words = BadWords::new(words.collect::<Result<Vec<_>, _>>()?);
    Ok(limits)
}

fn unpack_grammar(unpacker: &mut Unpacker<'_>) -> Result<Option<GrammarSpec>, WireError> {
    let kind = unpacker.uint()?;
    if kind == NONE {
        return Ok(None);
    }
    let texts = (0..unpacker.array(1)?).map(|_| unpacker.str().map(String::from));
    let mut texts = texts.collect::<Result<Vec<_>, _>>()?;
    let mut only = || texts.pop().unwrap_or_default();
    let source = match kind {
        JSON_OBJECT => GrammarSource::JsonObject,
        JSON_SCHEMA => GrammarSource::JsonSchema(only()),
        REGEX => GrammarSource::Regex(only()),
        CHOICE => GrammarSource::Choice(texts),
        LARK => GrammarSource::Lark(only()),
        value => return Err(unknown("the kind of a grammar", "from 1 to 5", value)),
    };
    let (kind, pattern) = (unpacker.uint()?, unpacker.str()?);
    let whitespace = match kind {
        BOUNDED => Whitespace::Bounded,
        COMPACT => Whitespace::Compact,
        PATTERN => Whitespace::Pattern(pattern.into()),
        value => return Err(unknown("the kind of white space", "from 0 to 2", value)),
    };
    Ok(Some(GrammarSpec { source, whitespace }))
}

fn unknown(name: &'static str, known: &'static str, value: u64) -> WireError {
    WireError::Unknown { name, known, value }
}
