//! `<think>` ... `</think>`.

use super::expected::{Expected, Match};
use super::machine::{Machine, split_first};
use super::tag_finder::TagFinder;
use super::writer::{Writer, is_blank};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// The format's tags.
pub(super) const MARKERS: &[&str] = &[OPEN, CLOSE];

/// The reasoning of DeepSeek-R1, of Qwen3, and of the many that write as they do.
///
/// Reasoning goes on to its closing tag, or to the end of the answer. Where an answer begins with
/// reasoning an opening tag may stand before it all the same. In the content an opening tag begins
/// reasoning, unless it is part of a call.
pub(super) struct Think {
    state: State,
    content: Box<dyn Machine>,
}

enum State {
    /// At the start of reasoning, before an opening tag that may come.
    Start(Expected),
    Inside(TagFinder),
    Outside(TagFinder),
}

impl Think {
    /// The machine in front of that of the content.
    pub(super) fn new(in_reasoning: bool, content: Box<dyn Machine>) -> Self {
        let state = if in_reasoning {
            State::Start(Expected::new(MARKERS))
        } else {
            outside()
        };
        Self { state, content }
    }

    fn advance<'t>(&mut self, text: &'t str, out: &mut Writer) -> &'t str {
        match &mut self.state {
            State::Start(expected) => {
                let (c, rest) = split_first(text);
                match expected.step(c, is_blank) {
                    Match::More => rest,
                    Match::Tag(OPEN) => {
                        self.state = inside();
                        rest
                    }
                    Match::Tag(_) => {
                        out.block();
                        self.state = outside();
                        rest
                    }
                    Match::Other => {
                        self.begin(out);
                        text
                    }
                }
            }
            State::Inside(finder) => {
                let found = finder.push(text, |text| out.reasoning(text));
                let Some((_, rest)) = found else { return "" };
                out.block();
                self.state = outside();
                rest
            }
            State::Outside(finder) => {
                let content = &mut self.content;
                let found = finder.push(text, |text| content.push(text, out));
                let Some((tag, rest)) = found else { return "" };
                if content.in_prose() {
                    content.settle(out);
                    out.block();
                    self.state = inside();
                } else {
                    content.push(tag, out);
                }
                rest
            }
        }
    }

    /// The reasoning begins without a tag.
    fn begin(&mut self, out: &mut Writer) {
        if let State::Start(mut expected) = std::mem::replace(&mut self.state, inside()) {
            self.push(&expected.take(), out);
        }
    }
}

fn inside() -> State {
    State::Inside(TagFinder::new(&[CLOSE]))
}

fn outside() -> State {
    State::Outside(TagFinder::new(&[OPEN]))
}

impl Machine for Think {
    fn push(&mut self, text: &str, out: &mut Writer) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = self.advance(rest, out);
        }
    }

    fn settle(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Start(expected) if expected.held() > 0 => {
                self.begin(out);
                self.settle(out);
            }
            State::Start(_) => {}
            State::Inside(finder) => finder.release(|text| out.reasoning(text)),
            State::Outside(finder) => {
                finder.release(|text| self.content.push(text, out));
                self.content.settle(out);
            }
        }
    }

    fn finish(&mut self, out: &mut Writer) {
        match &mut self.state {
            State::Start(_) | State::Inside(_) => self.settle(out),
            State::Outside(finder) => finder.release(|text| self.content.push(text, out)),
        }
        self.content.finish(out);
    }

    fn in_prose(&self) -> bool {
        matches!(self.state, State::Outside(_)) && self.content.in_prose()
    }

    fn held(&self) -> usize {
        let held = match &self.state {
            State::Start(expected) => expected.held(),
            State::Inside(finder) | State::Outside(finder) => finder.held(),
        };
        held + self.content.held()
    }
}
