//! Channels: `<|channel|>` and a header, `<|message|>` and a body.

use super::argument_text::{ArgumentText, Forward};
use super::expected::{Expected, Match};
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN];

/// Tags that end a message's body; the last two begin the next one, whose end mark is missing.
const END_TAGS: &[&str] = &[END, CALL, RETURN, START, CHANNEL];

/// Longest header, in bytes.
const HEADER_LIMIT: usize = 1024;

/// What comes before a recipient.
const RECIPIENT: &str = "to=";

/// What comes before a function's name in one.
const FUNCTIONS: &str = "functions.";

/// The format of gpt-oss, called Harmony.
///
/// A message to `functions.NAME` is a call; any other on the channel `analysis` is reasoning, and
/// on every other channel content. What is not asked for, reasoning or calls, is content.
/// A header that the end of the answer cuts off says nothing and is dropped with its tags.
pub(super) struct Channels {
    finder: TagFinder,
    find_reasoning: bool,
    find_calls: bool,
    state: State,
    content: Box<dyn Machine>,
}

enum State {
    /// Between messages; what stands there is content.
    Between,
    Header(Box<Header>),
    Reasoning,
    Content,
    Arguments(ArgumentText),
    /// After a call's arguments.
    Close(Expected),
}

/// A message's header: what stands before its channel, and from the channel on.
struct Header {
    /// The text so far, to come back if it grows too long.
    raw: String,
    role: String,
    channel: Option<String>,
}

impl Header {
    fn new(tag: &str, raw: String) -> Self {
        Self {
            raw,
            role: String::new(),
            channel: (tag == CHANNEL).then(String::new),
        }
    }

    fn push(&mut self, text: &str) {
        self.channel
            .as_mut()
            .unwrap_or(&mut self.role)
            .push_str(text);
    }

    /// How much of a text does not make the header too long.
    fn room_for(&self, text: &str) -> usize {
        let room = HEADER_LIMIT.saturating_sub(self.role.len() + self.channel().len());
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        ends.take_while(|end| *end <= room).last().unwrap_or(0)
    }

    fn channel(&self) -> &str {
        self.channel.as_deref().unwrap_or_default()
    }

    /// The function that the message goes to.
    fn function(&self) -> Option<&str> {
        let mut words = self
            .role
            .split_whitespace()
            .chain(self.channel().split_whitespace());
        let name = words.find_map(|word| word.strip_prefix(RECIPIENT)?.strip_prefix(FUNCTIONS));
        name.filter(|name| !name.is_empty())
    }

    /// The function, once all of its name has come.
    fn known_function(&self) -> Option<&str> {
        let last = self.channel.as_ref().unwrap_or(&self.role);
        let word = last.rsplit(is_blank).next().unwrap_or_default();
        self.function().filter(|_| !word.starts_with(RECIPIENT))
    }

    fn is_analysis(&self) -> bool {
        self.channel().split_whitespace().next() == Some("analysis")
    }
}

impl Channels {
    /// The machine in front of that of the content.
    pub(super) fn new(
        find_reasoning: bool,
        find_calls: bool,
        in_reasoning: bool,
        content: Box<dyn Machine>,
    ) -> Self {
        let state = if in_reasoning {
            State::Reasoning
        } else {
            State::Between
        };
        Self {
            finder: TagFinder::new(MARKERS),
            find_reasoning,
            find_calls,
            state,
            content,
        }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        match &mut self.state {
            State::Arguments(arguments) => {
                let (forward, rest) = arguments.push(text, out);
                match forward {
                    Forward::More => {}
                    Forward::Done => {
                        out.end_call();
                        self.state = State::Close(Expected::new(END_TAGS));
                    }
                    Forward::Tag(tag) => {
                        out.end_call();
                        self.end_tag(tag, out);
                    }
                }
                rest
            }
            State::Close(expected) => {
                let (c, rest) = split_first(text);
                match expected.step(c, is_blank) {
                    Match::More => rest,
                    Match::Tag(tag) => {
                        self.end_tag(tag, out);
                        rest
                    }
                    Match::Other => {
                        self.reopen(out);
                        text
                    }
                }
            }
            _ => self.text(text, out),
        }
    }

    /// Takes text up to the next tag, and the tag.
    fn text<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        let (state, content) = (&mut self.state, &mut self.content);
        let found = self
            .finder
            .push(text, |text| pass(state, content.as_mut(), text, out));
        let Some((tag, rest)) = found else { return "" };
        self.tag(tag, out);
        rest
    }

    fn tag(&mut self, tag: &'static str, out: &mut Writer) {
        match (&mut self.state, tag) {
            (State::Header(header), CHANNEL) => {
                header.raw.push_str(&out.shown(tag));
                header.channel = Some(String::new());
            }
            (State::Header(header), CONSTRAIN) => {
                header.raw.push_str(&out.shown(tag));
                header.push(" ");
            }
            (State::Header(_), MESSAGE) => self.begin_message(out),
            (_, START | CHANNEL)
            | (State::Header(_) | State::Reasoning | State::Content, END | CALL | RETURN) => {
                self.end_tag(tag, out);
            }
            (State::Reasoning, _) => out.reasoning(tag),
            (_, _) => self.content.push(tag, out),
        }
    }

    fn begin_message(&mut self, out: &mut Writer) {
        let State::Header(header) = &self.state else {
            return;
        };
        let function = header.function().filter(|_| self.find_calls);
        self.content.settle(out);
        out.block();
        self.state = match function {
            Some(name) => {
                out.call(name.to_owned());
                State::Arguments(ArgumentText::new(END_TAGS))
            }
            None if header.is_analysis() && self.find_reasoning => State::Reasoning,
            None => State::Content,
        };
    }

    /// A message has ended, or another one begins.
    fn end_tag(&mut self, tag: &'static str, out: &mut Writer) {
        self.content.settle(out);
        out.block();
        self.state = match tag {
            START | CHANNEL => State::Header(Box::new(Header::new(tag, out.shown(tag)))),
            _ => State::Between,
        };
    }

    /// The tag that was due has not come.
    fn reopen(&mut self, out: &mut Writer) {
        if let State::Close(mut expected) = std::mem::replace(&mut self.state, State::Between) {
            self.push(&expected.take(), out);
        }
    }
}

/// Text that is no tag.
fn pass(state: &mut State, content: &mut dyn Machine, text: &str, out: &mut Writer) {
    match state {
        State::Header(header) => {
            let fits = header.room_for(text);
            header.push(&text[..fits]);
            header
                .raw
                .push_str(if out.hidden { "" } else { &text[..fits] });
            if fits < text.len() {
                out.restore(&header.raw);
                *state = State::Between;
                content.push(&text[fits..], out);
            }
        }
        State::Reasoning => out.reasoning(text),
        State::Content => {
            // Reasoning that is not told apart may stand before a call, whatever else may not.
            let calls_only = std::mem::take(&mut out.calls_only);
            content.push(text, out);
            out.calls_only = calls_only;
        }
        _ => content.push(text, out),
    }
}

impl Machine for Channels {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Arguments(arguments) => arguments.release(out),
            State::Close(expected) if expected.held() > 0 => {
                self.reopen(out);
                self.settle(out);
            }
            State::Close(_) => {}
            state => {
                let content = self.content.as_mut();
                self.finder.release(|text| pass(state, content, text, out));
                content.settle(out);
            }
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        if let State::Arguments(_) | State::Reasoning | State::Content | State::Between = self.state
        {
            self.settle(out);
        }
        if let State::Header(header) = &self.state {
            let function = header.known_function().filter(|_| self.find_calls);
            out.cut(function, "");
        }
        self.content.finish(out);
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Between | State::Content) && self.content.in_prose()
    }

    fn held(&self) -> usize {
        let held = match &self.state {
            State::Header(header) => header.raw.len() + header.role.len() + header.channel().len(),
            State::Arguments(arguments) => arguments.held(),
            State::Close(expected) => expected.held(),
            State::Between | State::Reasoning | State::Content => 0,
        };
        held + self.finder.held() + self.content.held()
    }
}
