//! What the machines of all formats have in common.

use super::writer::Writer;

/// Reads one format. Everything it does depends on the characters alone, not on how they are cut.
pub(super) trait Machine: Send {
    /// Takes the next text.
    fn push(&mut self, text: &str, out: &mut Writer);

    /// What follows is no continuation of a tag that has begun: lets go of its beginning.
    fn settle(&mut self, out: &mut Writer);

    /// The answer ends.
    fn finish(&mut self, out: &mut Writer);

    /// Whether the last character belongs to no call, complete or not.
    fn in_prose(&self) -> bool;

    /// Bytes held back.
    fn held(&self) -> usize;
}

/// No format at all: everything is content.
pub(super) struct Plain;

impl Machine for Plain {
    fn push(&mut self, text: &str, out: &mut Writer) {
        out.content(text);
    }

    fn settle(&mut self, _: &mut Writer) {}

    fn finish(&mut self, _: &mut Writer) {}

    fn in_prose(&self) -> bool {
        true
    }

    fn held(&self) -> usize {
        0
    }
}

/// The first character of a text that is not empty, and the rest.
pub(super) fn split_first(text: &str) -> (char, &str) {
    let mut chars = text.chars();
    let first = chars.next().expect("invariant: there is text to take");
    (first, chars.as_str())
}
