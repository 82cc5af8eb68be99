//! Stop strings, found wherever the text is cut.

use super::error::TextError;

/// A stop string that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Its place in the list given.
    pub index: usize,
    /// Bytes of the push's text after the stop string's last.
    pub unused: usize,
}

const ROOT: u32 = 0;
const NO_PATTERN: u32 = u32::MAX;

/// One state: the longest end of the text so far that starts some stop string.
struct State {
    /// A stop string that begins with this state's text, and the length of that text.
    pattern: u32,
    depth: u32,
    /// State of the longest proper end of this text that starts a stop string.
    fail: u32,
    /// The longest stop string that this text ends with.
    found: u32,
    /// Range in `StopMatcher::edges`, sorted by byte.
    edges_from: u32,
    edges_to: u32,
}

/// Finds the first of several stop strings in a text that comes in pieces, and holds back only the longest end of the
/// text that may still become one.
///
/// The match that is complete first wins; of several complete at the same byte, the one that starts first (the longest);
/// of equal strings, the first in the list. The result does not depend on how the text is cut. An Aho-Corasick automaton
/// (Aho and Corasick 1975) with memory in proportion to the stop strings; amortised constant time a byte. The text held
/// back is the state's own, so nothing is copied into a buffer.
pub struct StopMatcher {
    patterns: Vec<String>,
    include_in_output: bool,
    states: Vec<State>,
    /// Byte and target state.
    edges: Vec<(u8, u32)>,
    /// The root's edges; `ROOT` where there is none.
    root: Box<[u32; 256]>,
    state: u32,
    matched: bool,
}

impl StopMatcher {
    /// `include_in_output`: the stop string itself is part of the text released.
    ///
    /// Fails on an empty stop string. No stop strings at all is valid: everything passes.
    pub fn new(patterns: Vec<String>, include_in_output: bool) -> Result<Self, TextError> {
        if let Some(index) = patterns.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        let mut matcher = Self {
            states: Vec::new(),
            edges: Vec::new(),
            root: Box::new([ROOT; 256]),
            patterns,
            include_in_output,
            state: ROOT,
            matched: false,
        };
        matcher.build();
        Ok(matcher)
    }

    /// The stop strings, as given.
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    /// Bytes held back now.
    pub fn held(&self) -> usize {
        self.states[self.state as usize].depth as usize
    }

    /// Takes the next text and appends to `out` what cannot be part of a stop string any more.
    ///
    /// With `enabled` false the text passes whole, and no stop string may begin in it or in what was held. After a match
    /// all further text is dropped.
    pub fn push(&mut self, text: &str, enabled: bool, out: &mut String) -> Option<StopMatch> {
        if self.matched {
            return None;
        }
        if !enabled {
            self.finish(out);
            out.push_str(text);
            return None;
        }
        let before = self.state;
        let bytes = text.as_bytes();
        let mut state = before;
        let mut at = 0;
        while at < bytes.len() {
            if state == ROOT {
                let Some(skip) = bytes[at..]
                    .iter()
                    .position(|byte| self.root[usize::from(*byte)] != ROOT)
                else {
                    break;
                };
                at += skip;
            }
            state = self.next(state, bytes[at]);
            at += 1;
            let found = self.states[state as usize].found;
            if found != NO_PATTERN {
                return Some(self.end(before, text, at, found as usize, out));
            }
        }
        self.state = state;
        let keep = self.states[state as usize].depth as usize;
        self.release(
            before,
            text,
            self.states[before as usize].depth as usize + bytes.len() - keep,
            out,
        );
        None
    }

    /// Appends the text held back: no stop string came of it.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(self.text_of(self.state));
        self.state = ROOT;
    }

    fn end(
        &mut self,
        before: u32,
        text: &str,
        at: usize,
        index: usize,
        out: &mut String,
    ) -> StopMatch {
        let end = self.states[before as usize].depth as usize + at;
        let hidden = if self.include_in_output {
            0
        } else {
            self.patterns[index].len()
        };
        self.release(before, text, end - hidden, out);
        self.state = ROOT;
        self.matched = true;
        StopMatch {
            index,
            unused: text.len() - at,
        }
    }

    /// Appends the first `count` bytes of the text held in a state followed by `text`.
    fn release(&self, held: u32, text: &str, count: usize, out: &mut String) {
        let held = self.text_of(held);
        out.push_str(&held[..count.min(held.len())]);
        out.push_str(&text[..count.saturating_sub(held.len())]);
    }

    fn text_of(&self, state: u32) -> &str {
        let state = &self.states[state as usize];
        if state.depth == 0 {
            ""
        } else {
            &self.patterns[state.pattern as usize][..state.depth as usize]
        }
    }

    fn child(&self, state: u32, byte: u8) -> Option<u32> {
        if state == ROOT {
            let child = self.root[usize::from(byte)];
            return (child != ROOT).then_some(child);
        }
        let State {
            edges_from,
            edges_to,
            ..
        } = self.states[state as usize];
        let edges = &self.edges[edges_from as usize..edges_to as usize];
        edges
            .binary_search_by_key(&byte, |edge| edge.0)
            .ok()
            .map(|at| edges[at].1)
    }

    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            if let Some(child) = self.child(state, byte) {
                return child;
            }
            if state == ROOT {
                return ROOT;
            }
            state = self.states[state as usize].fail;
        }
    }

    /// Builds the states breadth first, so that a state's failure state is complete before it.
    fn build(&mut self) {
        let mut sorted: Vec<u32> = (0..self.patterns.len() as u32).collect();
        sorted.sort_by(|a, b| self.patterns[*a as usize].cmp(&self.patterns[*b as usize]));
        // Each state with its range in `sorted`: the stop strings that begin with its text.
        let mut ranges = vec![0..sorted.len()];
        self.states.push(State {
            pattern: 0,
            depth: 0,
            fail: ROOT,
            found: NO_PATTERN,
            edges_from: 0,
            edges_to: 0,
        });
        let mut at = 0;
        while at < self.states.len() {
            self.add_children(at, &sorted, &mut ranges);
            at += 1;
        }
    }

    fn add_children(
        &mut self,
        parent: usize,
        sorted: &[u32],
        ranges: &mut Vec<std::ops::Range<usize>>,
    ) {
        let depth = self.states[parent].depth as usize;
        let range = ranges[parent].clone();
        let byte_of = |patterns: &[String], at: usize| {
            patterns[sorted[at] as usize].as_bytes().get(depth).copied()
        };
        self.states[parent].edges_from = self.edges.len() as u32;
        let mut from = range.start;
        while from < range.end {
            let mut to = from + 1;
            let byte = byte_of(&self.patterns, from);
            while to < range.end && byte_of(&self.patterns, to) == byte {
                to += 1;
            }
            if let Some(byte) = byte {
                self.add_state(parent, byte, sorted[from..to].iter().copied(), depth);
                ranges.push(from..to);
            }
            from = to;
        }
        self.states[parent].edges_to = self.edges.len() as u32;
    }

    fn add_state(
        &mut self,
        parent: usize,
        byte: u8,
        patterns: impl Iterator<Item = u32> + Clone,
        depth: usize,
    ) {
        let fail = if parent == ROOT as usize {
            ROOT
        } else {
            self.next(self.states[parent].fail, byte)
        };
        let whole = patterns
            .clone()
            .filter(|at| self.patterns[*at as usize].len() == depth + 1)
            .min();
        let child = self.states.len() as u32;
        let pattern = patterns
            .min()
            .expect("invariant: a state belongs to a pattern");
        let found = whole.unwrap_or(self.states[fail as usize].found);
        self.states.push(State {
            pattern,
            depth: depth as u32 + 1,
            fail,
            found,
            edges_from: 0,
            edges_to: 0,
        });
        if parent == ROOT as usize {
            self.root[usize::from(byte)] = child;
        } else {
            self.edges.push((byte, child));
        }
    }
}
