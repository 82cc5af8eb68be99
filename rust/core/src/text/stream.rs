//! The text half of one answer: ids and log-probabilities in, deltas out.

use std::collections::VecDeque;
use std::sync::Arc;

use super::decoder::TextModel;
use super::delta::{Delta, Finish, FinishReason, StopCause, TokenLogprob, TopLogprob};
use super::detokenizer::Detokenizer;
use super::error::TextError;
use super::parsed::ParsedText;
use super::stop::StopMatcher;
use crate::parse::ParseSpec;
use crate::prompt_logprobs::PromptLogprobs;

/// What a stream is asked for.
#[derive(Clone, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of a request"
)]
pub struct StreamSpec {
    /// Special tokens add no text.
    pub skip_special_tokens: bool,
    /// The generated ids follow a prompt; see [`Detokenizer`].
    pub continuation: bool,
    /// Strings that end the answer; none may be empty.
    pub stop: Vec<String>,
    /// The stop string that matched, or the text of a user's stop token, is part of the text.
    pub include_stop: bool,
    /// A stop string counts only if a token after this many completes it, and only from text of
    /// such tokens.
    pub min_tokens: u32,
    /// One delta with everything at the end.
    pub final_only: bool,
    /// Log-probabilities with at most so many alternatives a token; `None` for none at all.
    pub num_logprobs: Option<u32>,
    /// The formats to tell reasoning and tool calls apart by, if [`Delta::parts`] is wanted.
    ///
    /// What is parsed is the text as delivered: stop strings end it wherever they match, in reasoning
    /// and in calls too. Special tokens that are tags of the formats are seen by the parser even
    /// where they add no text.
    pub parse: Option<ParseSpec>,
}

/// The sampler's log-probabilities for one token.
#[derive(Clone, Copy, Debug)]
pub struct LogprobInput<'a> {
    /// Of the token chosen, natural logarithm.
    pub logprob: f32,
    /// Its place by probability, from 1.
    pub rank: u32,
    /// The likeliest ids, likeliest first.
    pub top_ids: &'a [u32],
    /// Their log-probabilities, in the same order.
    pub top_logprobs: &'a [f32],
}

/// One generated token.
#[derive(Clone, Copy, Debug)]
pub struct TokenInput<'a> {
    /// Its id.
    pub id: u32,
    /// Its log-probabilities, where the sampler gave them.
    pub logprob: Option<LogprobInput<'a>>,
}

impl TokenInput<'_> {
    /// A token without log-probabilities.
    pub fn new(id: u32) -> Self {
        Self { id, logprob: None }
    }
}

/// The token that ended an answer, counted but in general not shown.
#[derive(Clone, Copy, Debug)]
pub enum StopToken<'a> {
    /// The model's end of sequence: its text never appears, [`StopCause`] is `None`.
    EndOfSequence(TokenInput<'a>),
    /// One the caller asked to stop at: shown with `include_stop`, and named as the [`StopCause`].
    Requested(TokenInput<'a>),
}

/// Whether a stream wants more tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// More tokens are welcome.
    Continue,
    /// The answer has ended; what is pushed from now on is ignored.
    Stopped,
}

/// A token whose text has not been released yet.
struct HeldToken {
    id: u32,
    /// Where its text ends, in bytes of the detokenised text.
    end: usize,
    logprob: Option<Box<TokenLogprob>>,
}

/// Detokeniser, stop strings and the bookkeeping of which id belongs to which text.
pub struct TextStream {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    parsed: Option<ParsedText>,
    /// Special tokens add no text.
    skip_special_tokens: bool,
    include_stop: bool,
    min_tokens: u32,
    num_logprobs: Option<u32>,
    held: VecDeque<HeldToken>,
    /// Everything so far, for a stream that delivers at the end only.
    gathered: Option<Delta>,
    /// Text of the current token.
    fresh: String,
    /// Bytes of detokenised text that the stop matcher has seen.
    matched_to: usize,
    /// Stop strings count from here on, in bytes of the detokenised text; set when `min_tokens`
    /// have come.
    stops_from: Option<usize>,
    num_output_tokens: u32,
    num_delivered: u32,
    finished: bool,
}

impl TextStream {
    /// A stream at the start of an answer. Fails on an empty stop string.
    pub fn new(model: Arc<TextModel>, spec: StreamSpec) -> Result<Self, TextError> {
        Ok(Self {
            detokenizer: Detokenizer::new(model, spec.skip_special_tokens, spec.continuation),
            stop: StopMatcher::new(spec.stop, spec.include_stop)?,
            parsed: spec.parse.map(ParsedText::new),
            skip_special_tokens: spec.skip_special_tokens,
            include_stop: spec.include_stop,
            min_tokens: spec.min_tokens,
            num_logprobs: spec.num_logprobs,
            held: VecDeque::new(),
            gathered: spec.final_only.then(Delta::default),
            fresh: String::new(),
            matched_to: 0,
            stops_from: (spec.min_tokens == 0).then_some(0),
            num_output_tokens: 0,
            num_delivered: 0,
            finished: false,
        })
    }

    /// Tokens counted so far: all but those after a stop string.
    pub fn num_output_tokens(&self) -> u32 {
        self.num_output_tokens
    }

    /// Whether the answer has ended.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Takes a generated token and appends to `out` what became certain.
    ///
    /// `Stopped`: a stop string is complete and `out.finish` says so. With byte fallback that can
    /// show one token late (a run of byte tokens is text only when it has ended); the surplus token
    /// is neither delivered nor counted.
    pub fn push(&mut self, token: &TokenInput, out: &mut Delta) -> Verdict {
        if self.finished {
            return Verdict::Stopped;
        }
        self.fresh.clear();
        self.detokenizer.push(token.id, &mut self.fresh);
        self.hold(token);
        self.with_target(out, Self::settle);
        if self.finished {
            Verdict::Stopped
        } else {
            Verdict::Continue
        }
    }

    /// Ends the answer: what was held back appears, unless it completes a stop string, which then
    /// is the reason.
    ///
    /// `stop_token` is the token that ended the answer, not pushed before. Ignored after the end.
    pub fn finish(&mut self, reason: FinishReason, stop_token: Option<StopToken>, out: &mut Delta) {
        self.end(
            Finish {
                reason,
                stop: StopCause::None,
                error: None,
            },
            stop_token,
            out,
        );
    }

    /// Ends the answer with an error; the text so far stays.
    pub fn fail(&mut self, message: &str, out: &mut Delta) {
        let error = Some(message.to_owned());
        self.end(
            Finish {
                reason: FinishReason::Error,
                stop: StopCause::None,
                error,
            },
            None,
            out,
        );
    }

    fn end(&mut self, mut finish: Finish, stop_token: Option<StopToken>, out: &mut Delta) {
        if self.finished {
            return;
        }
        self.fresh.clear();
        let shown = match &stop_token {
            Some(StopToken::Requested(token)) if self.include_stop => Some(*token),
            _ => None,
        };
        if let Some(token) = shown {
            self.detokenizer.push(token.id, &mut self.fresh);
            self.hold(&token);
        }
        self.detokenizer.finish(&mut self.fresh);
        self.with_target(out, |stream, target| {
            stream.settle(target);
            if stream.finished {
                keep_failure(finish, target);
                return;
            }
            if let Some(StopToken::Requested(token)) = &stop_token {
                finish.stop = StopCause::Token(token.id);
            }
            let before = target.text.len();
            stream.stop.finish(&mut target.text);
            stream.parse(before, target);
            if let (None, Some(StopToken::EndOfSequence(token) | StopToken::Requested(token))) =
                (shown, &stop_token)
            {
                stream.hold(token);
            }
            stream.close(finish, target);
        });
    }

    /// Runs `work` on the delta that text goes to now, and delivers what was gathered when the
    /// answer has ended.
    fn with_target(&mut self, out: &mut Delta, work: impl FnOnce(&mut Self, &mut Delta)) {
        let Some(mut gathered) = self.gathered.take() else {
            return work(self, out);
        };
        work(self, &mut gathered);
        if self.finished {
            out.merge_from(&mut gathered);
        } else {
            self.gathered = Some(gathered);
        }
    }

    /// Counts a token whose text is in `fresh` or pending, and notes where that text ends.
    fn hold(&mut self, token: &TokenInput) {
        let end = self.matched_to + self.fresh.len() + self.detokenizer.pending_len();
        if let (Some(parsed), true) = (&mut self.parsed, self.skip_special_tokens) {
            parsed.note(self.detokenizer.model(), token.id, end);
        }
        let logprob = self
            .num_logprobs
            .zip(token.logprob)
            .map(|(limit, input)| Box::new(self.describe(token.id, &input, limit as usize)));
        self.held.push_back(HeldToken {
            id: token.id,
            end,
            logprob,
        });
        self.num_output_tokens += 1;
        if self.num_output_tokens == self.min_tokens {
            self.stops_from = Some(end);
        }
    }

    /// The log-probabilities of a prompt's tokens with their texts.
    pub fn describe_prompt(&self, prompt: &PromptLogprobs) -> Vec<TokenLogprob> {
        let width = prompt.top_width;
        let describe = |(at, &id): (usize, &u32)| {
            let top = at * width..(at + 1) * width;
            let input = LogprobInput {
                logprob: prompt.logprobs[at],
                rank: prompt.ranks[at],
                top_ids: &prompt.top_ids[top.clone()],
                top_logprobs: &prompt.top_logprobs[top],
            };
            self.describe(id, &input, width)
        };
        prompt.tokens.iter().enumerate().map(describe).collect()
    }

    fn describe(&self, id: u32, input: &LogprobInput, limit: usize) -> TokenLogprob {
        let model = self.detokenizer.model();
        let (text, bytes) = model.token_text(id);
        let top = input.top_ids.iter().zip(input.top_logprobs).take(limit);
        let top = top.map(|(&id, &logprob)| {
            let (text, bytes) = model.token_text(id);
            TopLogprob {
                id,
                text,
                bytes,
                logprob,
            }
        });
        TokenLogprob {
            id,
            text,
            bytes,
            logprob: input.logprob,
            rank: input.rank,
            top: top.collect(),
        }
    }

    /// Passes the fresh text through the stop strings and delivers the ids of what comes out.
    fn settle(&mut self, target: &mut Delta) {
        let before = target.text.len();
        let fresh = std::mem::take(&mut self.fresh);
        let exempt = exempt_len(
            &fresh,
            self.stops_from
                .map(|from| from.saturating_sub(self.matched_to)),
        );
        if exempt > 0 {
            self.stop.push(&fresh[..exempt], false, &mut target.text);
        }
        let found = self.stop.push(&fresh[exempt..], true, &mut target.text);
        self.matched_to += fresh.len();
        self.fresh = fresh;
        self.parse(before, target);
        if let Some(found) = found {
            self.drop_after(self.matched_to - found.unused);
            let stop = StopCause::Text(self.stop.patterns()[found.index].clone());
            self.close(
                Finish {
                    reason: FinishReason::Stop,
                    stop,
                    error: None,
                },
                target,
            );
        } else if target.text.len() > before {
            let released = self.matched_to - self.stop.held();
            let count = self
                .held
                .iter()
                .take_while(|token| token.end <= released)
                .count();
            self.deliver(count, target);
        }
    }

    /// Parses the text from a byte of the delta on.
    fn parse(&mut self, from: usize, target: &mut Delta) {
        if let Some(parsed) = &mut self.parsed {
            parsed.push(&target.text[from..], &mut target.parts);
        }
    }

    /// Forgets the tokens that begin at or after a byte of the text: those after a stop string.
    fn drop_after(&mut self, end: usize) {
        let kept = match self.held.iter().position(|token| token.end >= end) {
            Some(last) => last + 1,
            None => self.held.len(),
        };
        self.num_output_tokens -= (self.held.len() - kept) as u32;
        self.held.truncate(kept);
    }

    fn deliver(&mut self, count: usize, target: &mut Delta) {
        for token in self.held.drain(..count) {
            target.token_ids.push(token.id);
            target
                .logprobs
                .extend(token.logprob.map(|logprob| *logprob));
        }
        self.num_delivered += count as u32;
        target.num_output_tokens = self.num_delivered;
    }

    fn close(&mut self, finish: Finish, target: &mut Delta) {
        self.deliver(self.held.len(), target);
        if let Some(parsed) = &mut self.parsed {
            parsed.finish(&mut target.parts);
        }
        target.finish = Some(finish);
        self.finished = true;
    }
}

/// How much of a text lies before the point from which stop strings count: `from` bytes, whole
/// characters only, as a character belongs to the token that completed it. `None`: all of it.
fn exempt_len(text: &str, from: Option<usize>) -> usize {
    let mut len = from.unwrap_or(text.len()).min(text.len());
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    len
}

/// A cancelled or failed answer stays one, even if its last text completed a stop string.
fn keep_failure(finish: Finish, target: &mut Delta) {
    if matches!(finish.reason, FinishReason::Abort | FinishReason::Error) {
        target.finish = Some(finish);
    }
}
