//! What a stream gives its reader.

use crate::parse::Part;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string; see [`StopCause`].
    Stop,
    /// The token limit or the end of the context.
    Length,
    /// Cancelled.
    Abort,
    /// The engine failed; [`Finish::error`] says how.
    Error,
}

/// What stopped an answer that ended with [`FinishReason::Stop`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StopCause {
    /// The model's own end-of-sequence token, or no stop at all.
    #[default]
    None,
    /// A stop token the caller asked for.
    Token(u32),
    /// A stop string the caller asked for.
    Text(String),
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// What stopped it, if something did.
    pub stop: StopCause,
    /// What went wrong, for [`FinishReason::Error`].
    pub error: Option<String>,
}

/// One alternative at a position.
#[derive(Clone, Debug, PartialEq)]
pub struct TopLogprob {
    /// Token id.
    pub id: u32,
    /// Its text by itself, with U+FFFD for what is not UTF-8.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// The log-probability of a generated token and of the likeliest ones at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Its text by itself, with U+FFFD for what is not UTF-8.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens by probability, from 1.
    pub rank: u32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<TopLogprob>,
}

/// What became certain of an answer since the last delta.
///
/// `token_ids` (and `logprobs`, one for each id if asked for) are those of the text in the delta:
/// ids whose text is held back are held back with it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// New text: whole characters, no part of a stop string that matched.
    pub text: String,
    /// What the new text means, if the stream was asked to parse it; empty otherwise. Less than `text`
    /// where a format's tags are in it or a part of it is still undecided.
    pub parts: Vec<Part>,
    /// Ids that the new text is made of.
    pub token_ids: Vec<u32>,
    /// Log-probabilities of `token_ids`; empty when not asked for or not given.
    pub logprobs: Vec<TokenLogprob>,
    /// The end of the answer, in its last delta.
    pub finish: Option<Finish>,
    /// Ids delivered so far over the whole answer, those of this delta included. In the last delta
    /// it is the number of tokens of the answer.
    pub num_output_tokens: u32,
}

impl Delta {
    /// Whether there is nothing for a reader: no text, no ids, no end.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.parts.is_empty()
            && self.token_ids.is_empty()
            && self.finish.is_none()
    }

    /// Appends a later delta of the same answer and empties it; both keep their buffers.
    pub fn merge_from(&mut self, later: &mut Self) {
        self.text.push_str(&later.text);
        for part in later.parts.drain(..) {
            part.push(&mut self.parts);
        }
        self.token_ids.append(&mut later.token_ids);
        self.logprobs.append(&mut later.logprobs);
        self.num_output_tokens = self.num_output_tokens.max(later.num_output_tokens);
        if let Some(finish) = later.finish.take() {
            self.finish = Some(finish);
        }
        later.clear();
    }

    /// Empties the delta and keeps its buffers.
    pub fn clear(&mut self) {
        self.text.clear();
        self.parts.clear();
        self.token_ids.clear();
        self.logprobs.clear();
        self.finish = None;
        self.num_output_tokens = 0;
    }
}
