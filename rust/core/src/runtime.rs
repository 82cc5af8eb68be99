//! An engine with everything around it in one process: inbox, text side, hub.

use std::sync::Arc;

use crate::commands::Commands;
use crate::config::EngineConfig;
use crate::driver::{Driver, Listener};
use crate::engine::Command;
use crate::error::RuntimeError;
use crate::frontend::{Frontend, FrontendSpec};
use crate::output::Wake;
use crate::pipeline::StreamDelta;
use crate::stall::{StallCounters, StallPolicy};
use crate::step::StepOutput;
use crate::sync::Arc as HubArc;
use crate::text::TextModel;
use crate::text_side::{TextSender, TextSide};

/// A running engine. Its parts lock apart, so that no reader waits for a step.
pub struct Runtime {
    frontend: Frontend,
    driver: Arc<Driver>,
    text: TextSide,
}

/// What a [`Runtime`] is made of.
pub struct RuntimeSpec {
    /// Sizes and limits.
    pub config: EngineConfig,
    /// The model's end-of-sequence ids.
    pub eos: Vec<u32>,
    /// Ids below this may be given and sampled.
    pub vocab_size: u32,
    /// How ids become text.
    pub model: Arc<TextModel>,
    /// Give the text side a thread of its own.
    pub text_thread: bool,
    /// What to do about readers that do not read.
    pub policy: StallPolicy,
}

/// Sends what the engine says to the text side, and makes text of it where that has no thread.
struct ToText(TextSender);

impl Listener for ToText {
    fn hear(&self, output: &mut StepOutput) {
        self.0.send(output);
        self.0.turn();
    }
}

impl Runtime {
    /// Starts everything but the engine's own loop, which is the caller's.
    pub fn new(spec: RuntimeSpec) -> Result<Self, RuntimeError> {
        let eos = spec.eos.clone();
        let mut text = None;
        let driver = Driver::new::<_, RuntimeError>(spec.config.clone(), spec.eos, |inbox| {
            let wake = HubArc::new(Wake::new()?);
            let commands = Commands::new(inbox.clone());
            let side = TextSide::start(commands, wake, spec.policy, spec.text_thread)?;
            let sender = side.sender().clone();
            text = Some(side);
            Ok(ToText(sender))
        })?;
        let text = text.expect("invariant: the engine was given its listener");
        let frontend = Frontend::new(FrontendSpec {
            config: spec.config,
            vocab_size: spec.vocab_size,
            model: spec.model,
            eos,
            engine: Commands::new(driver.inbox().clone()),
            text: text.sender().inbox().clone(),
            opener: text.opener().clone(),
            first_id: 1,
            halt: driver.halt().clone(),
        });
        Ok(Self {
            frontend,
            driver: Arc::new(driver),
            text,
        })
    }

    /// Where requests come in.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }

    /// What the thread that steps holds.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Whether requests are alive, messages under way included.
    pub fn has_requests(&self) -> bool {
        self.frontend.num_submitted() > self.driver.num_ended()
    }

    /// Gives `deliver` all that is ready, one delta a stream.
    pub fn drain(&self, deliver: impl FnMut(u64, &mut StreamDelta)) {
        self.text.drain(deliver);
    }

    /// The descriptor that is readable when there is something to drain.
    pub fn wake(&self) -> &Wake {
        self.text.wake()
    }

    /// Forgets cached prefixes before the next step.
    pub fn reset_prefix_cache(&self) {
        let _ = self.driver.inbox().push(Command::ResetPrefixCache);
    }

    /// How often readers had to be paused or given up.
    pub fn stall_counters(&self) -> &StallCounters {
        self.text.stall_counters()
    }
}
