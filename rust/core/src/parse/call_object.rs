//! A call written as one JSON object.

use super::argument_text::{ArgumentText, Forward};
use super::json::{JsonScanner, StringDecoder};
use super::writer::{UNDECIDED_LIMIT, Writer, is_blank};

/// Longest key that is told apart from others, in bytes.
const KEY_LIMIT: usize = 64;

/// Keys that an object may have that stands in the text without a tag.
const BARE_KEYS: [&str; 6] = ["name", "parameters", "arguments", "type", "id", "function"];

/// Reads `{"name": ..., "arguments": ...}`, in any order of keys, `parameters` being the same.
///
/// The call is announced when its name is known and its arguments have begun, or at the object's
/// end. Until then the text is held; it comes back as content if the object is no call. Arguments
/// pass as they are written; those given as a JSON string pass as what the string says; `null`, or
/// none at all, is `{}`.
pub(super) struct CallObject {
    /// The text so far, while the call is not announced.
    raw: String,
    announced: bool,
    bare: bool,
    end_tags: &'static [&'static str],
    name: Option<String>,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
    key: String,
    at: At,
    /// What a step adds to the arguments.
    text: String,
}

enum At {
    Start,
    Key,
    InKey(StringDecoder),
    Colon,
    Value,
    Name(StringDecoder),
    Arguments(ArgumentText),
    ArgumentString(StringDecoder),
    /// How much of `null` has come.
    Null(usize),
    Other(JsonScanner),
    Scalar,
    Comma,
}

/// What a character was.
pub(super) enum Progress {
    /// Part of the object.
    More,
    /// Its last one: the call is complete.
    Done,
    /// The last one of the end tag, inside of arguments that have no end.
    Closed,
    /// No part of it; the call was announced and ends here.
    Torn,
    /// No part of it; it is no call, and has been given back as content.
    NoCall,
}

/// What a character is to the object.
enum Step {
    More,
    Done,
    Closed,
    Wrong,
}

impl CallObject {
    /// An object after an opening tag; `opening` is what is shown of the tag if it is no call.
    pub(super) fn tagged(opening: String, end_tags: &'static [&'static str]) -> Self {
        Self {
            raw: opening,
            announced: false,
            bare: false,
            end_tags,
            name: None,
            has_arguments: false,
            early: String::new(),
            key: String::new(),
            at: At::Start,
            text: String::new(),
        }
    }

    /// An object without a tag: a call only if it has arguments, and no keys that calls do not have.
    pub(super) fn bare() -> Self {
        Self {
            bare: true,
            ..Self::tagged(String::new(), &[])
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        let closing = match &self.at {
            At::Arguments(arguments) => arguments.held(),
            _ => 0,
        };
        self.raw.len() + self.early.len() + closing
    }

    /// Takes the next character.
    pub(super) fn step(&mut self, c: char, out: &mut Writer) -> Progress {
        let full = !self.announced && self.raw.len() >= UNDECIDED_LIMIT;
        let in_arguments = self.announced && matches!(self.at, At::Arguments(_));
        let step = if full || (out.hidden && !in_arguments) {
            Step::Wrong
        } else {
            self.json(c, out)
        };
        match step {
            Step::More => {
                if !self.announced {
                    self.raw.push(c);
                }
                Progress::More
            }
            Step::Done | Step::Closed | Step::Wrong if self.announced => {
                self.finish_string(out);
                out.end_call();
                match step {
                    Step::Done => Progress::Done,
                    Step::Closed => Progress::Closed,
                    _ => Progress::Torn,
                }
            }
            _ => {
                out.restore(&self.raw);
                Progress::NoCall
            }
        }
    }

    /// Lets go of the beginning of an end tag inside of the arguments.
    pub(super) fn settle(&mut self, out: &mut Writer) {
        if let At::Arguments(arguments) = &mut self.at {
            arguments.settle(false, &mut self.text);
            self.forward(out);
        }
    }

    /// The answer ends inside of the object: what came stays.
    pub(super) fn finish(&mut self, out: &mut Writer) {
        if out.calls_only && !matches!(self.at, At::Name(_)) {
            self.announce(out);
        }
        if !self.announced {
            out.restore(&std::mem::take(&mut self.raw));
            return;
        }
        self.settle(out);
        self.finish_string(out);
    }

    /// The text ends inside of arguments that are a string.
    fn finish_string(&mut self, out: &mut Writer) {
        if let At::ArgumentString(decoder) = &mut self.at {
            decoder.finish(&mut self.text);
            self.forward(out);
        }
    }

    fn json(&mut self, c: char, out: &mut Writer) -> Step {
        match &mut self.at {
            At::Start | At::Key | At::Colon | At::Value | At::Comma if is_blank(c) => {}
            At::Start if c == '{' => self.at = At::Key,
            At::Key if c == '"' => {
                self.key.clear();
                self.at = At::InKey(StringDecoder::json());
            }
            At::Key | At::Comma | At::Scalar if c == '}' => return self.end(out),
            At::InKey(decoder) => {
                if decoder.step(c, &mut self.key) {
                    self.at = At::Colon;
                    if self.bare && !BARE_KEYS.contains(&self.key.as_str()) {
                        return Step::Wrong;
                    }
                }
                if self.key.len() > KEY_LIMIT {
                    // Longer than any that matters: one that cannot become any of these.
                    self.key.replace_range(.., "\0");
                }
            }
            At::Colon if c == ':' => self.at = At::Value,
            At::Value => return self.begin_value(c, out),
            At::Name(decoder) => {
                if decoder.step(c, self.name.get_or_insert_default()) {
                    return self.end_name(out);
                }
            }
            At::Arguments(_) | At::ArgumentString(_) | At::Null(_) => return self.argument(c, out),
            At::Other(scanner) => {
                if scanner.step(c) {
                    self.at = At::Comma;
                }
            }
            At::Comma | At::Scalar if c == ',' => self.at = At::Key,
            At::Scalar if !matches!(c, '{' | '[' | ']' | '"' | ':') => {}
            At::Start | At::Key | At::Colon | At::Scalar | At::Comma => return Step::Wrong,
        }
        Step::More
    }

    fn begin_value(&mut self, c: char, out: &mut Writer) -> Step {
        match self.key.as_str() {
            "name" if self.name.is_none() => {
                if c != '"' {
                    return Step::Wrong;
                }
                self.at = At::Name(StringDecoder::json());
                Step::More
            }
            "arguments" | "parameters" if !self.has_arguments => {
                self.at = match c {
                    '{' | '[' => At::Arguments(ArgumentText::new(self.end_tags)),
                    '"' => At::ArgumentString(StringDecoder::json()),
                    'n' => At::Null(0),
                    _ => return Step::Wrong,
                };
                self.has_arguments = true;
                self.announce(out);
                if c == '"' {
                    Step::More
                } else {
                    self.argument(c, out)
                }
            }
            _ => {
                self.at = match c {
                    '{' | '[' | '"' => {
                        let mut scanner = JsonScanner::default();
                        scanner.step(c);
                        At::Other(scanner)
                    }
                    '}' | ']' | ',' | ':' => return Step::Wrong,
                    _ => At::Scalar,
                };
                Step::More
            }
        }
    }

    fn argument(&mut self, c: char, out: &mut Writer) -> Step {
        let ended = match &mut self.at {
            At::Arguments(arguments) => match arguments.step(c, out.hidden, &mut self.text) {
                Forward::More => false,
                Forward::Done => true,
                Forward::Tag(_) => return Step::Closed,
            },
            At::ArgumentString(decoder) => decoder.step(c, &mut self.text),
            At::Null(count) => {
                if "null".chars().nth(*count) != Some(c) {
                    return Step::Wrong;
                }
                *count += 1;
                *count == "null".len()
            }
            _ => unreachable!("invariant: only called inside of arguments"),
        };
        self.forward(out);
        if ended {
            self.at = At::Comma;
        }
        Step::More
    }

    fn end_name(&mut self, out: &mut Writer) -> Step {
        if self.name.as_ref().is_none_or(String::is_empty) {
            return Step::Wrong;
        }
        self.at = At::Comma;
        if self.has_arguments {
            self.announce(out);
        }
        Step::More
    }

    fn end(&mut self, out: &mut Writer) -> Step {
        if !self.bare {
            self.announce(out);
        }
        if self.announced {
            Step::Done
        } else {
            Step::Wrong
        }
    }

    /// Announces the call, if its name is known.
    fn announce(&mut self, out: &mut Writer) {
        if let (false, Some(name)) = (self.announced, &self.name) {
            self.announced = true;
            self.raw = String::new();
            out.call(name.clone());
            out.arguments(&std::mem::take(&mut self.early));
        }
    }

    fn forward(&mut self, out: &mut Writer) {
        if self.announced {
            out.arguments(&self.text);
        } else {
            self.early.push_str(&self.text);
        }
        self.text.clear();
    }
}
