//! `[name(key=value, ...), ...]`.

use super::expected::{Expected, Match};
use super::line_start::LineStart;
use super::machine::{Machine, split_first};
use super::python_arguments::{KEYWORD_LIMIT, PythonArguments};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const START: &str = "<|python_start|>";
const END: &str = "<|python_end|>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[START, END];

/// Longest beginning of a call, up to the first keyword, in bytes.
const HEAD_LIMIT: usize = 1024;

/// Calls in Python's syntax, as of Llama 3.2 and 4: a list of them that begins a line, or stands
/// between `<|python_start|>` and `<|python_end|>`.
///
/// A bracket begins a call if a dotted name follows, and a round bracket, and a keyword with `=` or
/// nothing.
pub(super) struct Pythonic {
    finder: TagFinder,
    line_start: LineStart,
    state: State,
}

enum State {
    Prose,
    Head(Box<Head>),
    Arguments(PythonArguments),
    /// After a call in the list.
    Comma,
    /// After the list.
    Close(Expected),
}

/// The beginning of a call.
struct Head {
    /// The text so far, to come back if this is no call.
    raw: String,
    name: String,
    at: At,
    /// The text behind the round bracket.
    keyword: String,
}

#[derive(PartialEq)]
enum At {
    /// Before the list's bracket.
    List,
    Name,
    NameEnd,
    Keyword,
}

/// What a character was to a head.
enum Step {
    More,
    /// The last one: the call is certain.
    Call,
    NoCall,
}

impl Head {
    fn new(raw: String, at: At) -> Self {
        Self {
            raw,
            name: String::new(),
            at,
            keyword: String::new(),
        }
    }

    fn step(&mut self, c: char) -> Step {
        if self.raw.len() >= HEAD_LIMIT {
            return Step::NoCall;
        }
        match self.at {
            At::List if c == '[' => self.at = At::Name,
            At::Name if is_word(c) || (c == '.' && !self.name.is_empty()) => {
                if self.name.is_empty() && c.is_numeric() {
                    return Step::NoCall;
                }
                self.name.push(c);
            }
            At::Name | At::NameEnd if c == '(' && !self.name.is_empty() => self.at = At::Keyword,
            At::Name if is_blank(c) && !self.name.is_empty() => self.at = At::NameEnd,
            At::Keyword => {
                self.keyword.push(c);
                let keyword = self.keyword[..self.keyword.len() - c.len_utf8()].trim_start();
                let named = !keyword.is_empty();
                match c {
                    ')' if !named => return Step::Call,
                    '=' if named => return Step::Call,
                    c if is_blank(c) => {}
                    c if is_word(c)
                        && keyword.len() < KEYWORD_LIMIT
                        && !keyword.ends_with(is_blank) => {}
                    _ => return Step::NoCall,
                }
            }
            At::List | At::Name | At::NameEnd if is_blank(c) => {}
            At::List | At::Name | At::NameEnd => return Step::NoCall,
        }
        self.raw.push(c);
        Step::More
    }
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

impl Pythonic {
    pub(super) fn new() -> Self {
        Self {
            finder: TagFinder::new(&[START, "["]),
            line_start: LineStart::new(),
            state: State::Prose,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (c, rest) = split_first(text);
        match &mut self.state {
            State::Prose => self.prose(text, out),
            State::Head(_) => self.head(text, out),
            State::Arguments(arguments) => {
                // Special tokens mean nothing inside of a call.
                if !out.hidden && arguments.step(c, out) {
                    self.state = State::Comma;
                }
                rest
            }
            State::Comma => {
                self.state = match c {
                    _ if out.hidden => State::Prose,
                    c if is_blank(c) => return rest,
                    ',' => State::Head(Box::new(Head::new(String::new(), At::Name))),
                    ']' => State::Close(Expected::new(&[END])),
                    _ => State::Prose,
                };
                if matches!(self.state, State::Prose) {
                    text
                } else {
                    rest
                }
            }
            State::Close(expected) => match expected.step(c, is_blank) {
                Match::More => rest,
                Match::Tag(_) => {
                    self.state = State::Prose;
                    self.line_start = LineStart::new();
                    rest
                }
                Match::Other => {
                    self.reopen(out);
                    text
                }
            },
        }
    }

    fn prose<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let line_start = &mut self.line_start;
        let found = self.finder.push(text, |prose| {
            line_start.push(prose);
            out.content(prose);
        });
        let Some((tag, rest)) = found else { return "" };
        if tag == START {
            self.state = State::Head(Box::new(Head::new(out.shown(tag), At::List)));
        } else if self.line_start.is_here() && !out.hidden {
            self.state = State::Head(Box::new(Head::new(tag.to_owned(), At::Name)));
        } else {
            out.content(tag);
        }
        rest
    }

    fn head<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let State::Head(head) = &mut self.state else {
            return text;
        };
        let (c, rest) = split_first(text);
        let step = if out.hidden {
            Step::NoCall
        } else {
            head.step(c)
        };
        match step {
            Step::More => rest,
            Step::Call => {
                out.call(std::mem::take(&mut head.name));
                let mut arguments = PythonArguments::new();
                let mut ended = false;
                for c in head.keyword.chars() {
                    ended = arguments.step(c, out);
                }
                self.state = if ended {
                    State::Comma
                } else {
                    State::Arguments(arguments)
                };
                rest
            }
            Step::NoCall => {
                out.restore(&head.raw);
                self.line_start = LineStart::new();
                self.line_start.push(&head.raw);
                self.state = State::Prose;
                text
            }
        }
    }

    /// No closing tag comes: what looked like one is prose.
    fn reopen(&mut self, out: &mut Writer) {
        if let State::Close(mut expected) = std::mem::replace(&mut self.state, State::Prose) {
            self.line_start = LineStart::new();
            self.push(&expected.take(), out);
        }
    }
}

impl Machine for Pythonic {
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
            State::Close(expected) if expected.held() > 0 => {
                self.reopen(out);
                self.settle(out);
            }
            State::Head(_) | State::Arguments(_) | State::Comma | State::Close(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Prose => self.settle(out),
            State::Head(head) => {
                let named = head.at == At::Keyword;
                out.cut(named.then_some(&head.name), &head.raw);
            }
            State::Arguments(arguments) => arguments.finish(out),
            State::Comma | State::Close(_) => {}
        }
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Prose)
    }

    fn held(&self) -> usize {
        match &self.state {
            State::Prose => self.finder.held(),
            State::Head(head) => head.raw.len() + head.name.len() + head.keyword.len(),
            State::Arguments(arguments) => arguments.held(),
            State::Comma => 0,
            State::Close(expected) => expected.held(),
        }
    }
}
