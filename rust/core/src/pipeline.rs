//! From the steps' tokens to the readers' deltas, on the text side of the house.
//!
//! Runs on its own thread ([`Pipeline::run`]) or wherever the engine is driven from
//! ([`Pipeline::turn`]). It owns the policy for readers that do not read: their deltas merge; past
//! `max_backlog` tokens the request is paused; after `stall_limit` it is cancelled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::commands::Commands;
use crate::engine::Command;
use crate::inbox::Receiver;
use crate::lane::{Lane, Offered};
use crate::output::{self, HubProducer, StreamProducer};
use crate::prompt_logprobs::PromptLogprobs;
use crate::request::RequestId;
use crate::stall::{StallCounters, StallPolicy};
use crate::step::{EndReason, OutputEntry, SpareOutputs, StepOutput};
use crate::text::{
    Delta, FinishReason, LogprobInput, StopToken, TextStream, TokenInput, TokenLogprob, Verdict,
};

/// What a reader gets: text, and where the prompt came from.
#[derive(Debug, Default)]
pub struct StreamDelta {
    /// Text, ids, logprobs, end.
    pub text: Delta,
    /// Which of the request's choices.
    pub index: u32,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Those of them that came from the prefix cache.
    pub num_cached_tokens: u32,
    /// Log-probabilities of the prompt's tokens but the first, once, if they were asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
}

impl output::Delta for StreamDelta {
    fn merge_from(&mut self, later: &mut Self) {
        self.text.merge_from(&mut later.text);
        self.index = later.index;
        self.num_prompt_tokens = later.num_prompt_tokens;
        self.num_cached_tokens = later.num_cached_tokens;
        if let Some(prompt) = later.prompt_logprobs.take() {
            self.prompt_logprobs = Some(prompt);
        }
    }

    fn clear(&mut self) {
        self.text.clear();
        self.index = 0;
        self.num_prompt_tokens = 0;
        self.num_cached_tokens = 0;
        self.prompt_logprobs = None;
    }

    fn weight(&self) -> usize {
        self.text.token_ids.len()
    }
}

/// A message to the text side.
pub enum TextMessage {
    /// A stream that the engine is about to speak of.
    Open {
        /// Its request.
        id: RequestId,
        /// Its text state.
        stream: Box<TextStream>,
        /// Its way out.
        producer: StreamProducer<StreamDelta>,
        /// Which of the request's choices it is.
        index: u32,
        /// Tokens of the prompt.
        num_prompt_tokens: u32,
        /// The way past its reader, if it has one.
        lane: Option<Arc<Lane>>,
    },
    /// What a step handed on.
    Step(StepOutput),
    /// The engine is lost: every stream ends with this error.
    Fail(String),
    /// The engine is gone: nothing follows.
    Close,
}

struct Stream {
    text: Box<TextStream>,
    producer: StreamProducer<StreamDelta>,
    index: u32,
    num_prompt_tokens: u32,
    /// The reader knows that tokens are coming.
    announced: bool,
    paused_since: Option<Instant>,
    lane: Option<Arc<Lane>>,
    /// Tokens that the reader was told of, or that went past it.
    told: u32,
}

impl Stream {
    /// Writes a delta to the reader's socket, or gives it to the reader.
    fn hand_on(&mut self, delta: &mut StreamDelta, merge: bool, event: &mut Vec<u8>) {
        let lane = self.lane.as_ref().filter(|_| !merge);
        let offered = lane.map_or(Offered::Declined, |lane| {
            lane.offer(self.told, delta, event)
        });
        self.told = self.told.max(delta.text.num_output_tokens);
        match offered {
            Offered::Sent => return,
            Offered::Declined => {}
            // The reader finds the rest in the lane, and has to be woken for it.
            Offered::Stuck => {
                let told = self.told;
                delta.text.clear();
                delta.text.num_output_tokens = told;
            }
        }
        self.producer.push(delta);
    }
}

/// All streams of an engine.
pub struct Pipeline {
    inbox: Receiver<TextMessage>,
    hub: HubProducer<StreamDelta>,
    engine: Commands,
    streams: FxHashMap<RequestId, Stream>,
    policy: StallPolicy,
    counters: Arc<StallCounters>,
    /// Paused streams in order of their pause; the front one's time runs out first.
    stalled: VecDeque<(Instant, RequestId)>,
    messages: Vec<TextMessage>,
    flushes: Vec<u64>,
    delta: StreamDelta,
    /// An event on its way past the reader.
    event: Vec<u8>,
    /// This step has another behind it: readers are to merge what it has for them.
    merge: bool,
    /// Where outputs go when they are read.
    spares: SpareOutputs,
    closed: bool,
}

impl Pipeline {
    /// A pipeline that hears from `inbox`, speaks through `hub`, tells `engine` what it finds and gives the
    /// outputs that it has read to `spares`.
    pub fn new(
        inbox: Receiver<TextMessage>,
        hub: HubProducer<StreamDelta>,
        engine: Commands,
        policy: StallPolicy,
        counters: Arc<StallCounters>,
        spares: SpareOutputs,
    ) -> Self {
        Self {
            inbox,
            hub,
            engine,
            streams: FxHashMap::default(),
            policy,
            counters,
            stalled: VecDeque::new(),
            messages: Vec::new(),
            flushes: Vec::new(),
            delta: StreamDelta::default(),
            event: Vec::new(),
            merge: false,
            spares,
            closed: false,
        }
    }

    /// Works until the engine is gone. Sleeps, without waking, while there is nothing to do.
    pub fn run(mut self) {
        while !self.closed {
            self.inbox.wait(self.patience());
            self.turn();
        }
    }

    /// Time until a paused reader's patience is at its end, if there is one.
    pub fn patience(&self) -> Option<Duration> {
        let (since, _) = self.stalled.front()?;
        Some((*since + self.policy.stall_limit).saturating_duration_since(Instant::now()))
    }

    /// Does all there is to do. True if there was anything.
    pub fn turn(&mut self) -> bool {
        let mut messages = std::mem::take(&mut self.messages);
        self.inbox.drain(&mut messages);
        let mut worked = !messages.is_empty();
        let is_step = |message: &TextMessage| matches!(message, TextMessage::Step(_));
        let mut steps = messages.iter().filter(|message| is_step(message)).count();
        for message in messages.drain(..) {
            match message {
                TextMessage::Open {
                    id,
                    stream,
                    producer,
                    index,
                    num_prompt_tokens,
                    lane,
                } => {
                    let paused_since = None;
                    let text = stream;
                    let stream = Stream {
                        text,
                        producer,
                        index,
                        num_prompt_tokens,
                        announced: false,
                        paused_since,
                        lane,
                        told: 0,
                    };
                    self.streams.insert(id, stream);
                }
                TextMessage::Step(step) => {
                    steps -= 1;
                    self.merge = steps > 0;
                    self.step(&step);
                    self.spares.give(step);
                }
                TextMessage::Fail(reason) => self.fail(&reason),
                TextMessage::Close => self.closed = true,
            }
        }
        self.messages = messages;
        worked |= self.flush();
        worked |= self.lose_patience(Instant::now());
        self.hub.notify();
        worked
    }

    /// Streams that are still open.
    pub fn num_streams(&self) -> usize {
        self.streams.len()
    }

    fn step(&mut self, step: &StepOutput) {
        for prompt in &step.prompt_logprobs {
            self.prompt(prompt);
        }
        let mut first = 0;
        for entry in &step.entries {
            let last = first + entry.num_tokens as usize;
            self.entry(step, entry, first..last);
            first = last;
        }
    }

    fn prompt(&mut self, prompt: &PromptLogprobs) {
        let Some(stream) = self.streams.get_mut(&prompt.id) else {
            return;
        };
        let out = &mut self.delta;
        out.index = stream.index;
        out.num_prompt_tokens = stream.num_prompt_tokens;
        out.prompt_logprobs = Some(stream.text.describe_prompt(prompt));
        stream.producer.push(out);
        output::Delta::clear(out);
    }

    fn entry(&mut self, step: &StepOutput, entry: &OutputEntry, tokens: std::ops::Range<usize>) {
        let Some(stream) = self.streams.get_mut(&entry.id) else {
            return;
        };
        let out = &mut self.delta;
        out.index = stream.index;
        out.num_prompt_tokens = stream.num_prompt_tokens;
        out.num_cached_tokens = entry.cached_tokens;
        let ends_on_token = matches!(entry.end, Some(EndReason::Eos(_) | EndReason::StopToken(_)));
        let shown = tokens.end - usize::from(ends_on_token);
        let stopped = (tokens.start..shown).any(|at| {
            let token = token_input(step, entry, at);
            stream.text.push(&token, &mut out.text) == Verdict::Stopped
        });
        if let (Some(end), false) = (&entry.end, stopped) {
            let last = || token_input(step, entry, shown);
            let text = &mut stream.text;
            match end {
                EndReason::Eos(_) => {
                    let token = StopToken::EndOfSequence(last());
                    text.finish(FinishReason::Stop, Some(token), &mut out.text);
                }
                EndReason::StopToken(_) => {
                    let token = StopToken::Requested(last());
                    text.finish(FinishReason::Stop, Some(token), &mut out.text);
                }
                EndReason::Length => text.finish(FinishReason::Length, None, &mut out.text),
                EndReason::Abort => text.finish(FinishReason::Abort, None, &mut out.text),
                EndReason::Error(message) => text.fail(message, &mut out.text),
            }
        }
        // The first token is told even if its text is held back: who waits for it has a deadline.
        let first = !stream.announced && entry.num_tokens > 0;
        if first || !out.text.is_empty() {
            stream.announced = true;
            stream.hand_on(out, self.merge, &mut self.event);
            let behind = stream.producer.backlog() > 0;
            self.counters
                .merged
                .fetch_add(u64::from(behind), Ordering::Relaxed);
        }
        output::Delta::clear(out);
        if stopped && entry.end.is_none() {
            let _ = self.engine.push(Command::Stop(entry.id));
        }
        if stopped || entry.end.is_some() {
            // What the engine may still say of a stopped request finds no stream and is dropped. The
            // producer loses nothing by going: its reader gets the tail.
            self.streams.remove(&entry.id);
        } else {
            self.mind_backlog(entry.id);
        }
    }

    fn fail(&mut self, reason: &str) {
        self.stalled.clear();
        for (_, mut stream) in self.streams.drain() {
            let out = &mut self.delta;
            out.index = stream.index;
            out.num_prompt_tokens = stream.num_prompt_tokens;
            stream.text.fail(reason, &mut out.text);
            stream.producer.push(out);
            output::Delta::clear(out);
        }
    }

    fn mind_backlog(&mut self, id: RequestId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.producer.is_closed() {
            let _ = self.engine.push(Command::Cancel(id));
        } else if stream.producer.backlog() > self.policy.max_backlog
            && stream.paused_since.is_none()
        {
            let now = Instant::now();
            stream.paused_since = Some(now);
            self.stalled.push_back((now, id));
            self.counters.paused.fetch_add(1, Ordering::Relaxed);
            let _ = self.engine.push(Command::Pause(id));
        }
    }

    /// Readers made room: give them what was held back.
    fn flush(&mut self) -> bool {
        let mut flushes = std::mem::take(&mut self.flushes);
        self.hub.take_flush_requests(&mut flushes);
        let worked = !flushes.is_empty();
        for id in flushes.drain(..) {
            let Some(stream) = self.streams.get_mut(&id) else {
                continue;
            };
            if stream.producer.flush() && stream.paused_since.take().is_some() {
                self.stalled.retain(|(_, stalled)| *stalled != id);
                let _ = self.engine.push(Command::Resume(id));
            }
        }
        self.flushes = flushes;
        worked
    }

    fn lose_patience(&mut self, now: Instant) -> bool {
        let mut worked = false;
        while let Some(&(since, id)) = self.stalled.front() {
            if since + self.policy.stall_limit > now {
                break;
            }
            self.stalled.pop_front();
            if self.streams.contains_key(&id) {
                worked = true;
                self.counters.cancelled.fetch_add(1, Ordering::Relaxed);
                let _ = self.engine.push(Command::Cancel(id));
            }
        }
        worked
    }
}

fn token_input<'a>(step: &'a StepOutput, entry: &OutputEntry, at: usize) -> TokenInput<'a> {
    let id = step.tokens[at];
    let logprob = entry
        .num_logprobs
        .filter(|_| !step.logprobs.is_empty())
        .map(|wanted| {
            let top = at * step.top_width..at * step.top_width + wanted as usize;
            LogprobInput {
                logprob: step.logprobs[at],
                rank: step.ranks[at],
                top_ids: &step.top_ids[top.clone()],
                top_logprobs: &step.top_logprobs[top],
            }
        });
    TokenInput { id, logprob }
}
