//! `<｜tool▁call▁begin｜>` ... `<｜tool▁call▁end｜>`.

use super::argument_text::{ArgumentText, Forward};
use super::expected::{Expected, Match};
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END];

const END_TAGS: &[&str] = &[CALL_END, CALLS_END];

/// Longest text between the tag that begins a call and its arguments, in bytes.
const HEAD_LIMIT: usize = 1024;

/// The format of `DeepSeek`'s models.
///
/// V3 and R1 write `function<｜tool▁sep｜>NAME`, a line end and the arguments in a Markdown block; V3.1
/// writes `NAME<｜tool▁sep｜>` and the arguments. The tags around all calls may be missing.
pub(super) struct DeepSeekV3 {
    finder: TagFinder,
    state: State,
}

enum State {
    Prose,
    /// Before a call; the text since the first tag, to come back if there is none at all.
    Between(String, Expected),
    Head(Box<Head>),
    Arguments(ArgumentText),
    /// After the arguments.
    Close(Expected),
}

/// A call up to its arguments.
struct Head {
    /// The text so far, to come back if this is no call.
    raw: String,
    /// The text before the separator.
    kind: String,
    finder: TagFinder,
    /// The text behind the separator, from its first line on.
    line: String,
    at: At,
}

#[derive(Clone, Copy)]
enum At {
    Kind,
    Line,
    /// Behind the line of V3's name.
    Fence,
}

/// What a character was to a head.
enum Step {
    More,
    /// The first one of the arguments of this function.
    Arguments(String),
    NoCall,
}

impl Head {
    fn new(raw: String) -> Self {
        Self {
            raw,
            kind: String::new(),
            finder: TagFinder::new(&[SEPARATOR]),
            line: String::new(),
            at: At::Kind,
        }
    }

    fn step(&mut self, c: char, hidden: bool) -> Step {
        if self.raw.len() >= HEAD_LIMIT {
            return Step::NoCall;
        }
        match self.at {
            At::Kind => {
                let kind = &mut self.kind;
                let mut buffer = [0; 4];
                let text = c.encode_utf8(&mut buffer);
                let found = self.finder.push(text, |text| kind.push_str(text));
                if found.is_some() {
                    self.at = At::Line;
                } else if self.kind.contains(['\n', '<']) {
                    return Step::NoCall;
                }
            }
            _ if hidden => return Step::NoCall,
            At::Line if c == '{' && self.line.trim().is_empty() => {
                let name = self.kind.trim();
                return if name.is_empty() {
                    Step::NoCall
                } else {
                    Step::Arguments(name.to_owned())
                };
            }
            At::Line if c == '\n' && !self.line.trim().is_empty() => self.at = At::Fence,
            At::Line if c == '<' => return Step::NoCall,
            At::Line => self.line.push(c),
            At::Fence if c == '{' => return Step::Arguments(self.line.trim().to_owned()),
            At::Fence if is_blank(c) || c == '`' || "json".contains(c) => {}
            At::Fence => return Step::NoCall,
        }
        if !hidden {
            self.raw.push(c);
        }
        Step::More
    }
}

impl DeepSeekV3 {
    pub(super) fn new() -> Self {
        Self {
            finder: TagFinder::new(&[CALLS_BEGIN, CALL_BEGIN]),
            state: State::Prose,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        match &mut self.state {
            State::Prose => {
                let found = self.finder.push(text, |prose| out.content(prose));
                let Some((tag, rest)) = found else { return "" };
                self.state = if tag == CALL_BEGIN {
                    State::Head(Box::new(Head::new(out.shown(tag))))
                } else {
                    between(out.shown(tag))
                };
                rest
            }
            State::Between(..) => self.between(text, out),
            State::Head(_) => self.head(text, out),
            State::Arguments(arguments) => {
                let (forward, rest) = arguments.push(text, out);
                if !matches!(forward, Forward::More) {
                    out.end_call();
                }
                match forward {
                    Forward::More => {}
                    Forward::Done => self.state = State::Close(Expected::new(END_TAGS)),
                    Forward::Tag(tag) => self.end_tag(tag),
                }
                rest
            }
            State::Close(expected) => match expected.step(c, |c| is_blank(c) || c == '`') {
                Match::More => rest,
                Match::Tag(tag) => {
                    self.end_tag(tag);
                    rest
                }
                Match::Other => {
                    self.reopen(out);
                    text
                }
            },
        }
    }

    fn between<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Between(raw, expected) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        if is_blank(c) && expected.held() == 0 {
            if !raw.is_empty() && raw.len() < HEAD_LIMIT {
                raw.push(c);
            }
            return rest;
        }
        match expected.step(c, |_| false) {
            Match::More => rest,
            Match::Tag(CALL_BEGIN) => {
                let raw = std::mem::take(raw) + &out.shown(CALL_BEGIN);
                self.state = State::Head(Box::new(Head::new(raw)));
                rest
            }
            Match::Tag(tag) => {
                // Tags around nothing are text like any other; behind calls they end them.
                if !raw.is_empty() {
                    let raw = std::mem::take(raw) + &out.shown(tag);
                    out.restore(&raw);
                }
                self.state = State::Prose;
                rest
            }
            Match::Other => {
                self.reopen(out);
                text
            }
        }
    }

    fn head<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Head(head) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        match head.step(c, out.hidden) {
            Step::More => rest,
            Step::Arguments(name) => {
                out.call(name);
                self.state = State::Arguments(ArgumentText::new(END_TAGS));
                text
            }
            Step::NoCall => {
                out.restore(&head.raw);
                self.state = State::Prose;
                text
            }
        }
    }

    fn end_tag(&mut self, tag: &str) {
        self.state = if tag == CALL_END {
            between(String::new())
        } else {
            State::Prose
        };
    }

    /// The tag that was due has not come.
    fn reopen(&mut self, out: &mut Writer) {
        let mut expected = match std::mem::replace(&mut self.state, State::Prose) {
            State::Between(raw, expected) => {
                out.restore(&raw);
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

fn between(raw: String) -> State {
    State::Between(raw, Expected::new(&[CALL_BEGIN, CALLS_END]))
}

impl Machine for DeepSeekV3 {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.finder.release(|prose| out.content(prose)),
            State::Arguments(arguments) => arguments.release(out),
            State::Between(_, expected) | State::Close(expected) if expected.held() > 0 => {
                self.reopen(out);
                self.settle(out);
            }
            State::Between(..) | State::Close(_) => {}
            State::Head(head) => {
                let kind = &mut head.kind;
                head.finder.release(|text| kind.push_str(text));
            }
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Between(raw, expected) if !raw.is_empty() => {
                let raw = std::mem::take(raw) + &expected.take();
                out.restore(&raw);
            }
            State::Head(head) => {
                let named = matches!(head.at, At::Fence);
                out.cut(named.then_some(head.line.trim()), &head.raw);
            }
            State::Prose | State::Arguments(_) => self.settle(out),
            State::Between(..) | State::Close(_) => {}
        }
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Prose)
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Between(raw, expected) => raw.len() + expected.held(),
            State::Head(head) => {
                head.raw.len() + head.kind.len() + head.line.len() + head.finder.held()
            }
            State::Arguments(arguments) => arguments.held(),
            State::Close(expected) => expected.held(),
        }
    }
}
