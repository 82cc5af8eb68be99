//! `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

use super::call_object::{CallObject, Progress};
use super::expected::{Expected, Match};
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[OPEN, CLOSE];

/// The format of Hermes and of Qwen 2.5 and 3.
///
/// Before the closing tag, surplus closing braces are dropped, and further objects are calls too. A
/// closing tag that is missing ends the call at its object's end.
pub(super) struct Hermes {
    finder: TagFinder,
    state: State,
}

enum State {
    Prose,
    Object(Box<CallObject>),
    /// After an object, before the closing tag.
    Close(Expected),
}

impl Hermes {
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
                self.state = State::Object(Box::new(CallObject::tagged(out.shown(tag), &[CLOSE])));
                rest
            }
            State::Object(object) => {
                let progress = object.step(c, out);
                self.state = match progress {
                    Progress::More => return rest,
                    Progress::Done | Progress::Torn => State::Close(Expected::new(&[CLOSE])),
                    Progress::Closed | Progress::NoCall => State::Prose,
                };
                match progress {
                    Progress::Torn | Progress::NoCall => text,
                    _ => rest,
                }
            }
            State::Close(expected) => match expected.step(c, |c| is_blank(c) || c == '}') {
                Match::More => rest,
                Match::Tag(_) => {
                    self.state = State::Prose;
                    rest
                }
                Match::Other if c == '{' && expected.held() == 0 => {
                    let object = CallObject::tagged(String::new(), &[CLOSE]);
                    self.state = State::Object(Box::new(object));
                    text
                }
                Match::Other => {
                    self.reopen(out);
                    text
                }
            },
        }
    }

    /// No closing tag comes: what looked like one is prose.
    fn reopen(&mut self, out: &mut Writer) {
        if let State::Close(mut expected) = std::mem::replace(&mut self.state, State::Prose) {
            self.push(&expected.take(), out);
        }
    }
}

impl Machine for Hermes {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.finder.release(|prose| out.content(prose)),
            State::Object(object) => object.settle(out),
            State::Close(expected) if expected.held() > 0 => {
                self.reopen(out);
                self.settle(out);
            }
            State::Close(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Object(object) => object.finish(out),
            State::Prose => self.settle(out),
            State::Close(_) => {}
        }
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Prose)
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Object(object) => object.held(),
            State::Close(expected) => expected.held(),
        }
    }
}
