//! `{"name": ..., "parameters": {...}}`.

use super::call_object::{CallObject, Progress};
use super::line_start::LineStart;
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const PYTHON_TAG: &str = "<|python_tag|>";

/// The format's tag.
pub(super) const MARKERS: &[&str] = &[PYTHON_TAG];

/// The format of Llama 3.1 and later.
///
/// A call is an object that begins a line, or follows `<|python_tag|>`, or another call; calls are
/// separated by `;`, white space or nothing. Without the tag the object must have both a name and
/// arguments, and no keys that calls do not have: other JSON is content.
pub(super) struct Llama3Json {
    finder: TagFinder,
    line_start: LineStart,
    state: State,
}

enum State {
    Prose,
    Object(Box<CallObject>),
    /// After a call.
    Between,
}

impl Llama3Json {
    pub(super) fn new() -> Self {
        Self {
            finder: TagFinder::new(&[PYTHON_TAG, "{"]),
            line_start: LineStart::new(),
            state: State::Prose,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        match &mut self.state {
            State::Prose => self.prose(text, out),
            State::Object(object) => {
                let progress = object.step(c, out);
                match progress {
                    Progress::More => return rest,
                    Progress::Done | Progress::Closed => self.state = State::Between,
                    Progress::Torn | Progress::NoCall => self.state = State::Prose,
                }
                self.line_start = LineStart::new();
                match progress {
                    Progress::NoCall => {
                        // Of its text all but blanks has been on this line.
                        self.line_start.push("{");
                        text
                    }
                    Progress::Torn => text,
                    _ => rest,
                }
            }
            State::Between if is_blank(c) || c == ';' => rest,
            State::Between => {
                self.state = State::Prose;
                text
            }
        }
    }

    fn prose<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let line_start = &mut self.line_start;
        let found = self.finder.push(text, |prose| {
            line_start.push(prose);
            out.content(prose);
        });
        let Some((tag, rest)) = found else { return "" };
        if tag == PYTHON_TAG {
            let object = CallObject::tagged(out.shown(tag), &[]);
            self.state = State::Object(Box::new(object));
        } else if self.line_start.is_here() {
            let mut object = CallObject::bare();
            object.step('{', out);
            self.state = State::Object(Box::new(object));
        } else {
            out.content(tag);
        }
        rest
    }
}

impl Machine for Llama3Json {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.finder.release(|prose| {
                self.line_start.push(prose);
                out.content(prose);
            }),
            State::Object(object) => object.settle(out),
            State::Between => {}
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Object(object) => object.finish(out),
            State::Prose | State::Between => self.settle(out),
        }
    }

    fn in_prose(&self) -> bool {
        !matches!(self.state, State::Object(_))
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Object(object) => object.held(),
            State::Between => 0,
        }
    }
}
