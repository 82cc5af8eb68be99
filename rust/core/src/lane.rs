//! A stream's own way to its socket, past the reader, for events that differ in their text alone.
//!
//! The reader opens it when all that it has of the stream has left, and from then on the text side writes. What is
//! anything else than more text, and what the socket does not take at once, is the reader's again: it closes the lane
//! before it writes a byte. Neither ever waits for more than one `send` that does not block.

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::driver::lock;
use crate::event::EventFrame;
use crate::parse::Part;
use crate::pipeline::StreamDelta;
use crate::send::send;

/// Which text of a delta an event holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneText {
    /// All of it; nothing is parsed.
    Whole,
    /// What the parser says is content.
    Content,
    /// What it says is reasoning.
    Reasoning,
}

/// Where a lane leads, and what goes there.
#[derive(Debug)]
pub struct Route {
    /// A socket that stays open until the lane is closed.
    pub socket: RawFd,
    /// What stands around each text.
    pub frame: EventFrame,
    /// Which text.
    pub text: LaneText,
    /// Tokens of the stream that its reader has had, by the last delta's count: the text side writes only if it has
    /// told nobody of more.
    pub told: u32,
}

/// What a lane has done since it was opened.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// What the socket did not take of the last event: to be written before anything else.
    pub rest: Vec<u8>,
    /// Bytes of all events, the rest's included.
    pub bytes: usize,
}

/// What became of a delta that was offered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    /// It is the reader's.
    Declined,
    /// It has been written.
    Sent,
    /// It has been written in part or not at all, and the lane is shut: the reader must come for the rest.
    Stuck,
}

#[derive(Default)]
struct State {
    route: Option<Route>,
    written: Written,
    last: Option<Instant>,
    tokens: u32,
}

/// See the module. Shared by the reader and the text side.
#[derive(Default)]
pub struct Lane {
    open: AtomicBool,
    state: Mutex<State>,
}

impl Lane {
    /// Has the text side write, if it has nothing under way to the reader. Close it first if it is open.
    pub fn open(&self, route: Route) {
        let mut state = lock(&self.state);
        state.tokens = route.told;
        state.route = Some(route);
        self.open.store(true, Ordering::Relaxed);
    }

    /// Has the text side write no more, when this returns. Says what it has written, once.
    pub fn close(&self) -> Written {
        let mut state = lock(&self.state);
        state.route = None;
        self.open.store(false, Ordering::Relaxed);
        std::mem::take(&mut state.written)
    }

    /// Tokens of the stream that were written or read by the time the lane was last open; 0 if it never was.
    pub fn num_output_tokens(&self) -> u32 {
        lock(&self.state).tokens
    }

    /// Time since something was last written; None if nothing ever was.
    pub fn silence(&self) -> Option<Duration> {
        lock(&self.state).last.map(|last| last.elapsed())
    }

    /// Writes a delta of a stream whose reader was told of so many tokens, if it may.
    pub(crate) fn offer(&self, told: u32, delta: &StreamDelta, scratch: &mut Vec<u8>) -> Offered {
        // Relaxed: a hint that spares the lock. One that is late costs a delta the way by the reader.
        if !self.open.load(Ordering::Relaxed) {
            return Offered::Declined;
        }
        let mut state = lock(&self.state);
        let state = &mut *state;
        let Some(route) = state.route.as_ref().filter(|_| state.tokens == told) else {
            return Offered::Declined;
        };
        let Some(text) = text_alone(route.text, delta) else {
            return Offered::Declined;
        };
        state.tokens = delta.text.num_output_tokens;
        if text.is_empty() {
            return Offered::Sent;
        }
        let event = route.frame.fill(text, scratch);
        let sent = send(route.socket, event);
        state.written.bytes += event.len();
        state.last = Some(Instant::now());
        if sent == event.len() {
            return Offered::Sent;
        }
        state.written.rest.extend_from_slice(&event[sent..]);
        state.route = None;
        self.open.store(false, Ordering::Relaxed);
        Offered::Stuck
    }
}

/// The text of a delta that has nothing else for its reader.
fn text_alone(wanted: LaneText, delta: &StreamDelta) -> Option<&str> {
    let text = &delta.text;
    if text.finish.is_some() || !text.logprobs.is_empty() || delta.prompt_logprobs.is_some() {
        return None;
    }
    match (wanted, text.parts.as_slice()) {
        (LaneText::Whole, []) => Some(&text.text),
        (LaneText::Content | LaneText::Reasoning, []) => Some(""),
        (LaneText::Content, [Part::Content(text)])
        | (LaneText::Reasoning, [Part::Reasoning(text)]) => Some(text),
        _ => None,
    }
}
