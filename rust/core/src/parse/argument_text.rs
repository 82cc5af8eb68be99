//! Arguments that are JSON, on their way through.

use super::json::JsonScanner;
use super::machine::split_first;
use super::writer::{Writer, is_blank};

/// Passes the JSON text of arguments on as it comes, and finds its end.
///
/// The end is that of the JSON value, or one of the format's end tags where JSON has no place for it:
/// outside of strings, or anywhere as a special token. A text that does not begin like a value with
/// an end of its own goes on to an end tag.
pub(super) struct ArgumentText {
    scanner: JsonScanner,
    end_tags: &'static [&'static str],
    begun: Begun,
    /// The beginning of what may be an end tag.
    closing: String,
}

#[derive(PartialEq)]
enum Begun {
    No,
    /// With a bracket or a quote.
    Value,
    /// With anything else.
    Text,
}

/// What a character was.
pub(super) enum Forward {
    /// Part of the arguments.
    More,
    /// Their last one.
    Done,
    /// The last one of this end tag.
    Tag(&'static str),
}

impl ArgumentText {
    pub(super) fn new(end_tags: &'static [&'static str]) -> Self {
        Self {
            scanner: JsonScanner::default(),
            end_tags,
            begun: Begun::No,
            closing: String::new(),
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        self.closing.len()
    }

    /// Takes a text up to the arguments' end, and returns what follows it.
    pub(super) fn push<'t>(&mut self, text: &'t str, out: &mut Writer) -> (Forward, &'t str) {
        let mut passed = String::with_capacity(text.len());
        let mut rest = text;
        let mut forward = Forward::More;
        while !rest.is_empty() && matches!(forward, Forward::More) {
            let (c, after) = split_first(rest);
            forward = self.step(c, out.hidden, &mut passed);
            rest = after;
        }
        out.arguments(&passed);
        (forward, rest)
    }

    /// The text ends inside of the arguments, or a tag comes that is none of theirs.
    pub(super) fn release(&mut self, out: &mut Writer) {
        let mut passed = String::new();
        self.settle(false, &mut passed);
        out.arguments(&passed);
    }

    /// Takes the next character and appends what became certain. Hidden ones never become text.
    pub(super) fn step(&mut self, c: char, hidden: bool, out: &mut String) -> Forward {
        if !self.closing.is_empty() || hidden || !self.scanner.in_string() {
            self.closing.push(c);
            let closing = self.closing.as_str();
            match self.end_tags.iter().find(|tag| tag.starts_with(closing)) {
                Some(tag) if tag.len() == closing.len() => {
                    self.closing.clear();
                    return Forward::Tag(tag);
                }
                Some(_) => return Forward::More,
                None => {
                    self.closing.pop();
                    self.settle(hidden, out);
                }
            }
        }
        if hidden || (self.begun == Begun::No && is_blank(c)) {
            return Forward::More;
        }
        if self.begun == Begun::No {
            self.begun = match c {
                '{' | '[' | '"' => Begun::Value,
                _ => Begun::Text,
            };
        }
        out.push(c);
        if self.scanner.step(c) && self.begun == Begun::Value {
            Forward::Done
        } else {
            Forward::More
        }
    }

    /// Lets go of the beginning of an end tag.
    pub(super) fn settle(&mut self, hidden: bool, out: &mut String) {
        if !self.closing.is_empty() {
            if !hidden {
                if self.begun == Begun::No {
                    self.begun = Begun::Text;
                }
                out.push_str(&self.closing);
            }
            self.closing.clear();
        }
    }
}
