//! `[TOOL_CALLS]`, followed by a JSON array or by `name[ARGS]{...}`.

use super::argument_text::{ArgumentText, Forward};
use super::call_object::{CallObject, Progress};
use super::expected::{Expected, Match};
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[OPEN, ARGS, CALL_ID];

/// Longest name, or id, in bytes.
const NAME_LIMIT: usize = 256;

/// The format of Mistral's models.
///
/// Before tokenizer version 11: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. Since then:
/// `[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]id` between the two in some, once for each call.
/// The ids are the model's own and are dropped.
pub(super) struct Mistral {
    finder: TagFinder,
    state: State,
}

enum State {
    Prose,
    /// After the tag, which is shown so.
    Open(String),
    Object {
        object: Box<CallObject>,
        in_array: bool,
    },
    /// After an object of an array.
    Comma,
    Head(Box<Head>),
    Arguments(ArgumentText),
}

/// A call's name, until its arguments begin.
struct Head {
    /// The text so far, to come back if this is no call.
    raw: String,
    name: String,
    at: At,
}

enum At {
    Name,
    Tag(Expected),
    Id(usize),
    /// Before the arguments' bracket.
    Arguments,
}

/// What a character was to a head.
enum Step {
    More,
    /// The arguments begin with it.
    Arguments,
    /// No part of a call.
    NoCall,
}

impl Head {
    fn new(raw: String) -> Self {
        Self {
            raw,
            name: String::new(),
            at: At::Name,
        }
    }

    fn held(&self) -> usize {
        let tag = match &self.at {
            At::Tag(expected) => expected.held(),
            _ => 0,
        };
        self.raw.len() + self.name.len() + tag
    }

    fn step(&mut self, c: char, hidden: bool) -> Step {
        match &mut self.at {
            At::Tag(expected) => match expected.step(c, |_| false) {
                Match::More => return Step::More,
                Match::Tag(tag) => {
                    if !hidden {
                        self.raw.push_str(tag);
                    }
                    self.at = if tag == ARGS {
                        At::Arguments
                    } else {
                        At::Id(0)
                    };
                    return Step::More;
                }
                Match::Other => return Step::NoCall,
            },
            At::Name if c == '[' && !self.name.is_empty() => {
                self.at = At::Tag(Expected::new(&[ARGS, CALL_ID]));
                return self.step(c, hidden);
            }
            At::Id(_) if c == '[' => {
                self.at = At::Tag(Expected::new(&[ARGS]));
                return self.step(c, hidden);
            }
            _ if hidden => return Step::NoCall,
            At::Arguments if matches!(c, '{' | '[') => return Step::Arguments,
            At::Name if c == '{' && !self.name.is_empty() => return Step::Arguments,
            At::Arguments if is_blank(c) && self.raw.len() < 2 * NAME_LIMIT => {}
            At::Name if is_name(c) && self.name.len() < NAME_LIMIT => self.name.push(c),
            At::Id(len) if c.is_alphanumeric() && *len < NAME_LIMIT => *len += c.len_utf8(),
            _ => return Step::NoCall,
        }
        self.raw.push(c);
        Step::More
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}

impl Mistral {
    pub(super) fn new() -> Self {
        Self {
            finder: TagFinder::new(&[OPEN]),
            state: State::Prose,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        match &mut self.state {
            State::Prose => {
                let found = self.finder.push(text, |prose| out.content(prose));
                let Some((tag, rest)) = found else { return "" };
                self.state = State::Open(out.shown(tag));
                rest
            }
            State::Open(raw) => {
                if (is_blank(c) || c == '[') && !out.hidden && raw.len() < NAME_LIMIT {
                    raw.push(c);
                    return rest;
                }
                let raw = std::mem::take(raw);
                self.state = if c == '{' {
                    State::Object {
                        in_array: raw.trim_end().ends_with('['),
                        object: Box::new(CallObject::tagged(raw, &[])),
                    }
                } else {
                    State::Head(Box::new(Head::new(raw)))
                };
                text
            }
            State::Object { object, in_array } => {
                let progress = object.step(c, out);
                self.state = match progress {
                    Progress::More => return rest,
                    Progress::Done if *in_array => State::Comma,
                    _ => State::Prose,
                };
                match progress {
                    Progress::Torn | Progress::NoCall => text,
                    _ => rest,
                }
            }
            State::Comma => self.comma(text, out),
            State::Head(_) => self.head(text, out),
            State::Arguments(arguments) => {
                let (forward, rest) = arguments.push(text, out);
                if !matches!(forward, Forward::More) {
                    out.end_call();
                    self.state = State::Prose;
                }
                rest
            }
        }
    }

    fn comma<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        match c {
            _ if out.hidden => {}
            ',' => return rest,
            '{' => {
                let object = Box::new(CallObject::tagged(String::new(), &[]));
                self.state = State::Object {
                    object,
                    in_array: true,
                };
                return text;
            }
            c if is_blank(c) => return rest,
            ']' => {
                self.state = State::Prose;
                return rest;
            }
            _ => {}
        }
        self.state = State::Prose;
        text
    }

    fn head<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Head(head) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        match head.step(c, out.hidden) {
            Step::More => rest,
            Step::Arguments => {
                out.call(std::mem::take(&mut head.name));
                self.state = State::Arguments(ArgumentText::new(&[]));
                text
            }
            Step::NoCall => {
                self.give_back(out);
                text
            }
        }
    }

    /// The head is none.
    fn give_back(&mut self, out: &mut Writer) {
        if let State::Head(head) = std::mem::replace(&mut self.state, State::Prose) {
            out.restore(&head.raw);
            if let At::Tag(mut expected) = head.at {
                self.push(&expected.take(), out);
            }
        }
    }
}

impl Machine for Mistral {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.finder.release(|prose| out.content(prose)),
            State::Object { object, .. } => object.settle(out),
            State::Head(head) => {
                if matches!(&head.at, At::Tag(expected) if expected.held() > 0) {
                    self.give_back(out);
                    self.settle(out);
                }
            }
            State::Open(_) | State::Comma | State::Arguments(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Open(raw) => out.restore(&std::mem::take(raw)),
            State::Object { object, .. } => object.finish(out),
            State::Head(head) => {
                let mut raw = std::mem::take(&mut head.raw);
                if let At::Tag(expected) = &mut head.at {
                    raw += &expected.take();
                }
                let named = !matches!(head.at, At::Name);
                out.cut(named.then_some(&head.name), &raw);
            }
            State::Prose | State::Comma | State::Arguments(_) => self.settle(out),
        }
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Prose)
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Open(raw) => raw.len(),
            State::Object { object, .. } => object.held(),
            State::Head(head) => head.held(),
            State::Comma => 0,
            State::Arguments(arguments) => arguments.held(),
        }
    }
}
