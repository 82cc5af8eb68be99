//! Where requests come in, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::commands::Commands;
use crate::config::EngineConfig;
use crate::engine::Command;
use crate::error::SubmitError;
use crate::grammar::{CompiledGrammar, GrammarCompiler, GrammarSpec};
use crate::halt::Halt;
use crate::inbox::Inbox;
use crate::lane::Lane;
use crate::output::{HubOpener, StreamGuard};
use crate::pipeline::{StreamDelta, TextMessage};
use crate::request::{Arrival, NewRequest, RequestId};
use crate::text::{StreamSpec, TextModel, TextStream};

/// The submitting side of a running engine.
pub struct Frontend {
    config: EngineConfig,
    vocab_size: u32,
    model: Arc<TextModel>,
    grammars: GrammarCompiler,
    engine: Commands,
    text: Inbox<TextMessage>,
    opener: HubOpener<StreamDelta>,
    next_id: AtomicU64,
    /// Choices sent to the engine so far.
    submitted: AtomicU64,
    halt: Arc<Halt>,
}

/// What a [`Frontend`] is made of.
pub(crate) struct FrontendSpec {
    /// The engine's sizes and limits.
    pub config: EngineConfig,
    /// Ids below this may be given and sampled.
    pub vocab_size: u32,
    /// How ids become text.
    pub model: Arc<TextModel>,
    /// The model's end-of-sequence ids.
    pub eos: Vec<u32>,
    /// Where the engine hears of requests.
    pub engine: Commands,
    /// Where the text side does.
    pub text: Inbox<TextMessage>,
    /// Where streams come from.
    pub opener: HubOpener<StreamDelta>,
    /// Id of the first choice; those after it count up.
    pub first_id: RequestId,
    /// Whether the engine has stopped.
    pub halt: Arc<Halt>,
}

/// A submitted request: the hold of its reader. Dropping it cancels what has not ended.
pub struct Submission {
    first: RequestId,
    guards: Vec<StreamGuard<StreamDelta>>,
    lane: Option<Arc<Lane>>,
    engine: Commands,
}

impl Frontend {
    pub(crate) fn new(spec: FrontendSpec) -> Self {
        Self {
            config: spec.config,
            vocab_size: spec.vocab_size,
            grammars: GrammarCompiler::new(spec.model.clone(), spec.vocab_size, spec.eos),
            model: spec.model,
            engine: spec.engine,
            text: spec.text,
            opener: spec.opener,
            next_id: AtomicU64::new(spec.first_id),
            submitted: AtomicU64::new(0),
            halt: spec.halt,
        }
    }

    /// Choices sent to the engine so far.
    pub fn num_submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// Makes a grammar ready for requests, or finds it ready. Takes milliseconds, and the first time a good
    /// part of a second for a large vocabulary: not for a thread that others wait for.
    pub fn compile_grammar(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, SubmitError> {
        Ok(self.grammars.compile(spec)?)
    }

    /// Checks a request and sends it in. Nothing is queued if it is refused.
    pub fn submit(
        &self,
        request: NewRequest,
        mut spec: StreamSpec,
    ) -> Result<Submission, SubmitError> {
        if let Some(reason) = self.halt.get() {
            return Err(SubmitError::EngineStopped { reason });
        }
        request.validate(self.config.max_model_len, self.config.max_logprobs)?;
        check_tokens(&request, self.vocab_size)?;
        self.check_grammar(&request)?;
        spec.num_logprobs = request.sampling.num_logprobs;
        spec.min_tokens = request.sampling.min_tokens;
        let n = request.n;
        let texts = (0..n).map(|_| TextStream::new(self.model.clone(), spec.clone()));
        let texts: Result<Vec<_>, _> = texts.collect();
        let texts = texts.map_err(|error| SubmitError::Parameter {
            name: "stop",
            limit: "a list of non-empty strings".into(),
            value: error.to_string(),
        })?;
        let first = self.next_id.fetch_add(u64::from(n), Ordering::Relaxed);
        let mut guards = Vec::with_capacity(texts.len());
        let lane = (n == 1).then(Arc::<Lane>::default);
        let num_prompt_tokens = request.prompt.len() as u32;
        for (index, text) in (0..).zip(texts) {
            let id = first + u64::from(index);
            let (producer, guard) = self.opener.open(id);
            guards.push(guard);
            let stream = Box::new(text);
            // The text side hears of the stream before the engine can speak of it.
            let message = TextMessage::Open {
                id,
                stream,
                producer,
                index,
                num_prompt_tokens,
                lane: lane.clone(),
            };
            self.text.push(message).map_err(|_| self.gone())?;
        }
        // Counted before the engine can end them.
        self.submitted.fetch_add(u64::from(n), Ordering::Relaxed);
        let arrival = Arrival::default();
        let command = Command::Add {
            first,
            request: Box::new(request),
            arrival,
        };
        if self.engine.push(command).is_err() {
            self.submitted.fetch_sub(u64::from(n), Ordering::Relaxed);
            return Err(self.gone());
        }
        Ok(Submission {
            first,
            guards,
            lane,
            engine: self.engine.clone(),
        })
    }

    fn gone(&self) -> SubmitError {
        let reason = self.halt.get().unwrap_or_else(|| "it was closed".into());
        SubmitError::EngineStopped { reason }
    }

    fn check_grammar(&self, request: &NewRequest) -> Result<(), SubmitError> {
        match &request.limits.grammar {
            Some(grammar) if !self.grammars.owns(grammar) => Err(SubmitError::Parameter {
                name: "structured_outputs",
                limit: "a grammar that this engine compiled".into(),
                value: "another's".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// Checks that the request names no token that the model does not have.
pub(crate) fn check_tokens(request: &NewRequest, vocab_size: u32) -> Result<(), SubmitError> {
    if let Some(&token) = request.prompt.iter().find(|&&token| token >= vocab_size) {
        return Err(SubmitError::Vocabulary { token, vocab_size });
    }
    let sampling = &request.sampling;
    let biased = sampling.logit_bias.iter().map(|(token, _)| token);
    let limits = &request.limits;
    let allowed = limits.allowed_token_ids.iter().flatten();
    let lists: [(&'static str, Option<u32>); 5] = [
        (
            "stop_token_ids",
            sampling.stop_token_ids.iter().max().copied(),
        ),
        ("logit_bias", biased.max().copied()),
        ("allowed_token_ids", allowed.max().copied()),
        ("bad_words", limits.bad_words.ids().max()),
        (
            "structured_outputs",
            limits.grammar_after.iter().max().copied(),
        ),
    ];
    for (name, largest) in lists {
        if let Some(value) = largest.filter(|&token| token >= vocab_size) {
            let limit = format!("token ids below the vocabulary size of {vocab_size}");
            return Err(SubmitError::Parameter {
                name,
                limit,
                value: value.to_string(),
            });
        }
    }
    Ok(())
}

impl Submission {
    /// Ids of the request's choices: the first, and how many there are.
    pub fn ids(&self) -> (RequestId, u32) {
        (self.first, self.guards.len() as u32)
    }

    /// The way past the reader. Only a request of one choice has it: the events of several must not mix.
    pub fn lane(&self) -> Option<&Arc<Lane>> {
        self.lane.as_ref()
    }

    /// Ends the request; its reader gets what was generated and the end `Abort`.
    pub fn cancel(&self) {
        for (id, _) in (self.first..).zip(&self.guards) {
            let _ = self.engine.push(Command::Cancel(id));
        }
    }

    /// The reader wants nothing any more.
    pub fn close(&self) {
        if let Some(lane) = &self.lane {
            lane.close();
        }
        let open = self.guards.iter().filter(|guard| !guard.is_closed());
        for guard in open {
            guard.close();
            let _ = self.engine.push(Command::Cancel(guard.key()));
        }
    }

    /// The reader is busy: leave its deltas where they are until [`Self::resume`].
    pub fn hold(&self) {
        self.guards.iter().for_each(StreamGuard::hold);
    }

    /// The reader is back.
    pub fn resume(&self) {
        self.guards.iter().for_each(StreamGuard::resume);
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.close();
    }
}
