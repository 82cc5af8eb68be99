//! `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

use std::sync::Arc;

use super::expected::{Expected, Match};
use super::json::quoted;
use super::machine::{Machine, split_first};
use super::parameter_value::ParameterValue;
use super::tag_finder::TagFinder;
use super::tool_types::ToolTypes;
use super::writer::{Writer, is_blank};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[
    OPEN,
    CLOSE,
    FUNCTION,
    END_FUNCTION,
    PARAMETER,
    END_PARAMETER,
];

/// Longest name of a function or parameter, in bytes.
const NAME_LIMIT: usize = 256;

/// The format of Qwen3-Coder, whose arguments become a JSON object.
///
/// The outer tag may be missing, as it often is. A value is what its parameter's declared type makes
/// of it; see [`ParameterValue`]. What is no parameter ends the call.
pub(super) struct Qwen3Coder {
    finder: TagFinder,
    types: Arc<ToolTypes>,
    /// The function of the current call.
    function: String,
    /// Parameters of the current call so far.
    count: usize,
    state: State,
}

enum State {
    Prose,
    /// After the outer tag; the text so far, to come back if this is no call.
    Open(String, Expected),
    /// The function's name, and the text so far.
    Function(String, String),
    Body(Expected),
    Key(String),
    Value(ParameterValue, TagFinder),
    /// After the function.
    Close(Expected),
}

impl Qwen3Coder {
    pub(super) fn new(types: Arc<ToolTypes>) -> Self {
        Self {
            finder: TagFinder::new(&[OPEN, FUNCTION]),
            types,
            function: String::new(),
            count: 0,
            state: State::Prose,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        let matched = match &mut self.state {
            State::Prose => {
                let found = self.finder.push(text, |prose| out.content(prose));
                let Some((tag, rest)) = found else { return "" };
                let raw = out.shown(tag);
                self.state = match tag {
                    FUNCTION => State::Function(String::new(), raw),
                    _ => State::Open(raw, Expected::new(&[FUNCTION])),
                };
                return rest;
            }
            State::Open(raw, expected) => {
                if is_blank(c) && expected.held() == 0 && raw.len() < NAME_LIMIT {
                    raw.push(c);
                    return rest;
                }
                expected.step(c, |_| false)
            }
            State::Function(..) => return self.function(text, out),
            State::Key(_) => return self.key(text, out),
            State::Value(value, finder) => {
                let found = finder.push(text, |part| value.push(part, out));
                let Some((_, rest)) = found else { return "" };
                value.end(out);
                self.state = body();
                return rest;
            }
            State::Body(expected) | State::Close(expected) => expected.step(c, is_blank),
        };
        match matched {
            Match::More => rest,
            Match::Tag(tag) => {
                self.tag(tag, out);
                rest
            }
            Match::Other => {
                self.reopen(out);
                text
            }
        }
    }

    /// A tag has come where it was due.
    fn tag(&mut self, tag: &'static str, out: &mut Writer) {
        match (tag, &mut self.state) {
            (FUNCTION, State::Open(raw, _)) => {
                let raw = std::mem::take(raw) + &out.shown(tag);
                self.state = State::Function(String::new(), raw);
            }
            (FUNCTION, _) => self.state = State::Function(String::new(), out.shown(tag)),
            (PARAMETER, _) => self.state = State::Key(String::new()),
            (END_FUNCTION, _) => {
                self.end_call(out);
                self.state = State::Close(Expected::new(&[CLOSE, FUNCTION]));
            }
            (_, state) => {
                if matches!(state, State::Body(_)) {
                    self.end_call(out);
                }
                self.state = State::Prose;
            }
        }
    }

    fn function<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Function(name, raw) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        if c == '>' && !out.hidden && !name.trim().is_empty() {
            self.function = name.trim().to_owned();
            self.count = 0;
            out.call(self.function.clone());
            self.state = body();
            rest
        } else if ends_name(c, name, out) {
            out.restore(raw);
            self.state = State::Prose;
            text
        } else {
            name.push(c);
            raw.push(c);
            rest
        }
    }

    fn key<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Key(key) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        if c == '>' && !out.hidden {
            let key = key.trim();
            let lead = if self.count == 0 { "{" } else { ", " };
            out.arguments(&format!("{lead}{}: ", quoted(key)));
            self.count += 1;
            let value = ParameterValue::new(self.types.get(&self.function, key));
            self.state = State::Value(value, TagFinder::new(&[END_PARAMETER]));
            rest
        } else if ends_name(c, key, out) {
            self.end_call(out);
            self.state = State::Prose;
            text
        } else {
            key.push(c);
            rest
        }
    }

    fn end_call(&mut self, out: &mut Writer) {
        if self.count > 0 {
            out.arguments_shown("}");
        }
        out.end_call();
    }

    /// The tag that was due has not come.
    fn reopen(&mut self, out: &mut Writer) {
        let mut expected = match std::mem::replace(&mut self.state, State::Prose) {
            State::Open(raw, expected) => {
                out.restore(&raw);
                expected
            }
            State::Body(expected) => {
                self.end_call(out);
                expected
            }
            State::Close(expected) => expected,
            other => {
                self.state = other;
                return;
            }
        };
        self.push(&expected.take(), out);
    }
}

fn body() -> State {
    State::Body(Expected::new(&[PARAMETER, END_FUNCTION, CLOSE]))
}

fn ends_name(c: char, name: &str, out: &Writer) -> bool {
    out.hidden || matches!(c, '<' | '>' | '\n') || name.len() >= NAME_LIMIT
}

impl Machine for Qwen3Coder {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.finder.release(|prose| out.content(prose)),
            State::Value(value, finder) => finder.release(|part| value.push(part, out)),
            State::Open(_, expected) | State::Body(expected) | State::Close(expected) => {
                if expected.held() > 0 {
                    self.reopen(out);
                    self.settle(out);
                }
            }
            State::Function(..) | State::Key(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Open(raw, expected) => {
                let raw = std::mem::take(raw) + &expected.take();
                out.restore(&raw);
            }
            State::Function(_, raw) => out.restore(&std::mem::take(raw)),
            State::Prose => self.settle(out),
            State::Value(..) => {
                // The beginning of a tag is one of a value only if the value may be anything.
                if !out.calls_only {
                    self.settle(out);
                }
                if let State::Value(value, _) = &mut self.state {
                    value.finish(out);
                }
            }
            State::Body(_) | State::Key(_) | State::Close(_) => {}
        }
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Prose)
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Open(raw, expected) => raw.len() + expected.held(),
            State::Function(name, raw) => name.len() + raw.len(),
            State::Key(key) => key.len(),
            State::Body(expected) | State::Close(expected) => expected.held(),
            State::Value(value, finder) => value.held() + finder.held(),
        }
    }
}
