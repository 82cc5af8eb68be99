//! The parser of a stream, and where in the text special tokens stand that it must know of.

use std::collections::VecDeque;

use super::decoder::TextModel;
use crate::parse::{ParseSpec, Parser, Part};

/// Parses the text that a stream releases.
///
/// Special tokens that say a tag of the formats come beside the text: they add nothing to it, so
/// that text, ids and stop strings are those of a stream without a parser, and are given to the
/// parser at the place in the text at which they stand.
pub(super) struct ParsedText {
    parser: Parser,
    spec: ParseSpec,
    /// Where the tags stand, in bytes of the detokenised text.
    markers: VecDeque<(usize, &'static str)>,
    /// Bytes of text parsed so far.
    parsed: usize,
}

impl ParsedText {
    pub(super) fn new(spec: ParseSpec) -> Self {
        Self {
            parser: Parser::new(&spec),
            spec,
            markers: VecDeque::new(),
            parsed: 0,
        }
    }

    /// Notes a token that adds nothing to the text because it is special; it stands at byte `at`.
    pub(super) fn note(&mut self, model: &TextModel, id: u32, at: usize) {
        if model.is_special(id)
            && let Some(marker) = self.spec.marker(model.own_bytes(id))
        {
            self.markers.push_back((at, marker));
        }
    }

    /// Parses the next text released.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        let mut rest = text;
        while let Some((at, marker)) = self.markers.front()
            && *at <= self.parsed + rest.len()
        {
            let mut before = at.saturating_sub(self.parsed);
            while !rest.is_char_boundary(before) {
                before -= 1;
            }
            self.parser.push(&rest[..before], out);
            self.parser.push_marker(marker, out);
            self.parsed += before;
            rest = &rest[before..];
            self.markers.pop_front();
        }
        self.parser.push(rest, out);
        self.parsed += rest.len();
    }

    /// The answer ends.
    pub(super) fn finish(&mut self, out: &mut Vec<Part>) {
        self.parser.finish(out);
    }
}
