//! One stream's way from token ids to text that will not change any more.

use std::sync::Arc;

use super::decoder::{Join, TextModel};
use super::pieces::Piece;
use super::steps::{self, Step};

/// Turns token ids into text, a token at a time, appending only text that later tokens cannot change.
///
/// The texts of all pushes and of [`finish`](Self::finish) together equal `Tokenizer.decode(ids, skip_special_tokens)`
/// of the tokenizers library, with U+FFFD where it has it. Held back: the first bytes of a character whose last bytes have
/// not come (three bytes at most); with byte fallback, a run of byte tokens until its end, as one wrong byte makes all of
/// the run U+FFFD; for a decoder chain outside the known kinds, everything.
///
/// With `continuation` the ids follow other text: the first one is not the start of a text, so it keeps the leading space
/// that `SentencePiece`-style decoders take off the start.
///
/// Ids outside the vocabulary say nothing. No id sequence panics. A push costs amortised constant time and no allocation
/// (but for the decoders that go through the tokenizers library).
pub struct Detokenizer {
    model: Arc<TextModel>,
    skip_special_tokens: bool,
    progress: Progress,
}

/// Where a stream is; apart from the model so that both can be borrowed at once.
struct Progress {
    /// No token has been decoded yet and the text starts here.
    at_start: bool,
    /// A character and how many more copies of it go if they come next.
    strip: Option<(char, usize)>,
    /// Bytes of an unfinished character, or of a run of byte tokens.
    pending: Vec<u8>,
    /// How much of a run of byte tokens is known to be whole characters.
    checked: usize,
    /// The run of byte tokens is not UTF-8.
    run_is_broken: bool,
    /// The run of byte tokens is at the start of the text.
    run_is_first: bool,
    /// Ids that a decoder of several tokens still needs: the last one, or all.
    ids: Vec<u32>,
}

impl Detokenizer {
    /// A stream at its start; see the type for `continuation`.
    pub fn new(model: Arc<TextModel>, skip_special_tokens: bool, continuation: bool) -> Self {
        let progress = Progress {
            at_start: !continuation,
            strip: model.strip().filter(|_| !continuation),
            pending: Vec::new(),
            checked: 0,
            run_is_broken: false,
            run_is_first: false,
            ids: Vec::new(),
        };
        Self {
            model,
            skip_special_tokens,
            progress,
        }
    }

    /// The tokens this stream speaks.
    pub fn model(&self) -> &Arc<TextModel> {
        &self.model
    }

    /// Bytes held back: of an unfinished character or a run of byte tokens.
    pub fn pending_len(&self) -> usize {
        self.progress.pending.len()
    }

    /// Takes one token and appends the text that became certain.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let Some(special) = self.model.known_special(id) else {
            return;
        };
        if special && self.skip_special_tokens {
            return;
        }
        let progress = &mut self.progress;
        let piece = self.model.piece(id, progress.at_start);
        match (self.model.join(), piece) {
            (Join::Bytes, Piece::Text(bytes)) => progress.push_bytes(bytes, out),
            (Join::Text { after }, Piece::Text(bytes)) => {
                progress.end_run(after, out);
                progress.emit(
                    std::str::from_utf8(bytes).expect("invariant: pieces of text are UTF-8"),
                    out,
                );
            }
            (Join::Text { after }, Piece::Byte(byte)) => progress.push_run_byte(byte, after, out),
            (Join::Pairwise { steps, names }, _) => progress.push_pair(id, steps, names, out),
            (Join::Whole { .. }, _) => progress.ids.push(id),
            (Join::Bytes, Piece::Byte(_)) => {
                unreachable!("invariant: a byte-level table has no byte tokens")
            }
        }
        progress.at_start = false;
    }

    /// Appends what was held back: the end of the text.
    pub fn finish(&mut self, out: &mut String) {
        let progress = &mut self.progress;
        match self.model.join() {
            Join::Bytes => progress.end_bytes(out),
            Join::Text { after } => progress.end_run(after, out),
            Join::Pairwise { .. } => {}
            Join::Whole { steps, names } => {
                let text = decode(steps, names, &std::mem::take(&mut progress.ids));
                progress.emit(&text, out);
            }
        }
    }
}

impl Progress {
    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        if self.pending.is_empty() {
            if let Ok(text) = std::str::from_utf8(bytes) {
                self.emit(text, out);
                return;
            }
        }
        let mut joined = std::mem::take(&mut self.pending);
        joined.extend_from_slice(bytes);
        let mut keep = joined.len();
        let mut chunks = joined.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.emit(chunk.valid(), out);
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && is_unfinished(invalid) {
                keep = joined.len() - invalid.len();
            } else if !invalid.is_empty() {
                self.emit("\u{FFFD}", out);
            }
        }
        joined.drain(..keep);
        self.pending = joined;
    }

    fn end_bytes(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            self.emit("\u{FFFD}", out);
        }
    }

    fn push_run_byte(&mut self, byte: u8, after: &[Step], out: &mut String) {
        if self.pending.is_empty() && !self.run_is_broken {
            self.run_is_first = self.at_start;
        }
        self.pending.push(byte);
        if !self.run_is_broken {
            match std::str::from_utf8(&self.pending[self.checked..]) {
                Ok(_) => self.checked = self.pending.len(),
                Err(error) => self.run_is_broken = error.error_len().is_some(),
            }
        }
        if self.run_is_broken {
            self.emit_broken_run(after, out);
        }
    }

    fn end_run(&mut self, after: &[Step], out: &mut String) {
        if self.checked < self.pending.len() {
            self.emit_broken_run(after, out);
        } else if !self.pending.is_empty() {
            let run = std::mem::take(&mut self.pending);
            let text = std::str::from_utf8(&run).expect("invariant: a run is checked as it grows");
            self.emit_after(text, 1, after, out);
            self.pending = run;
            self.pending.clear();
        }
        self.checked = 0;
        self.run_is_broken = false;
    }

    /// One U+FFFD for each byte held.
    fn emit_broken_run(&mut self, after: &[Step], out: &mut String) {
        let count = self.pending.len();
        self.pending.clear();
        self.checked = 0;
        self.emit_after("\u{FFFD}", count, after, out);
    }

    /// Emits `count` tokens that a run became, through the steps that follow byte fallback.
    fn emit_after(&mut self, text: &str, count: usize, after: &[Step], out: &mut String) {
        if after.is_empty() {
            for _ in 0..count {
                self.emit(text, out);
            }
            return;
        }
        let tokens = vec![text.to_owned(); count];
        let run = if self.run_is_first {
            steps::run_chain
        } else {
            steps::run_chain_later
        };
        self.run_is_first = false;
        // A regular expression that gives up is the only error a step knows; the text then stays as it is.
        let changed =
            run(after, tokens).map_or_else(|_| text.repeat(count), |tokens| tokens.concat());
        self.emit(&changed, out);
    }

    fn push_pair(&mut self, id: u32, steps: &[Step], names: &[Option<Box<str>>], out: &mut String) {
        let before = decode(steps, names, &self.ids);
        self.ids.push(id);
        let both = decode(steps, names, &self.ids);
        if let Some(text) = both.strip_prefix(before.as_str()) {
            self.emit(text, out);
        }
        self.ids.clear();
        self.ids.push(id);
    }

    fn emit(&mut self, mut text: &str, out: &mut String) {
        while let Some((content, left)) = self.strip {
            if text.is_empty() {
                return;
            }
            let rest = text.strip_prefix(content).filter(|_| left > 0);
            self.strip = rest.map(|_| (content, left - 1));
            text = rest.unwrap_or(text);
        }
        out.push_str(text);
    }
}

/// Whether later bytes may still make a character of these, the invalid end of a chunk.
fn is_unfinished(invalid: &[u8]) -> bool {
    !invalid.is_empty()
        && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none())
}

/// Decodes ids through the library's steps; known ids only. An error of a step gives no text.
fn decode(steps: &[Step], names: &[Option<Box<str>>], ids: &[u32]) -> String {
    let tokens = ids
        .iter()
        .filter_map(|id| names.get(*id as usize)?.as_deref().map(String::from))
        .collect();
    steps::run_chain(steps, tokens)
        .map(|tokens| tokens.concat())
        .unwrap_or_default()
}
