//! The end of a process that talks to clients: everything but the engine itself.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::command::{Message, pack_commands};
use super::error::WireError;
use super::stats::unpack_stats;
use super::step::unpack_step;
use super::{client_ids, frame};
use crate::commands::Commands;
use crate::config::EngineConfig;
use crate::driver::lock;
use crate::engine::Command;
use crate::error::RuntimeError;
use crate::frontend::{Frontend, FrontendSpec};
use crate::halt::Halt;
use crate::inbox::{self, Receiver};
use crate::output::Wake;
use crate::pipeline::{StreamDelta, TextMessage};
use crate::stall::{StallCounters, StallPolicy};
use crate::stats::Stats;
use crate::sync::Arc as HubArc;
use crate::text::TextModel;
use crate::text_side::TextSide;

/// What a [`Client`] is made of.
pub struct ClientSpec {
    /// The engine's sizes and limits.
    pub config: EngineConfig,
    /// Ids below this may be given.
    pub vocab_size: u32,
    /// How ids become text.
    pub model: Arc<TextModel>,
    /// The model's end-of-sequence ids.
    pub eos: Vec<u32>,
    /// Its number, which no other client of the engine has or had.
    pub client: u16,
    /// What to do about readers that do not read.
    pub policy: StallPolicy,
}

/// Requests in and text out for an engine elsewhere.
///
/// It has no threads: whoever brings frames makes the text of them. One wake says both that there are deltas to
/// drain and that there are messages to send.
pub struct Client {
    frontend: Frontend,
    text: TextSide,
    commands: Commands,
    outgoing: Mutex<Receiver<Command>>,
    halt: Arc<Halt>,
    stats: Mutex<Stats>,
    number: u16,
}

impl Client {
    /// An end without any requests.
    pub fn new(spec: ClientSpec) -> Result<Self, RuntimeError> {
        spec.config.validate()?;
        let wake = HubArc::new(Wake::new()?);
        let (inbox, outgoing) = inbox::inbox();
        let commands = Commands::telling(inbox, wake.clone());
        let text = TextSide::start(commands.clone(), wake, spec.policy, false)?;
        let halt = Arc::<Halt>::default();
        let frontend = Frontend::new(FrontendSpec {
            config: spec.config,
            vocab_size: spec.vocab_size,
            model: spec.model,
            eos: spec.eos,
            engine: commands.clone(),
            text: text.sender().inbox().clone(),
            opener: text.opener().clone(),
            first_id: client_ids(spec.client).start + 1,
            halt: halt.clone(),
        });
        Ok(Self {
            frontend,
            text,
            commands,
            outgoing: Mutex::new(outgoing),
            halt,
            stats: Mutex::default(),
            number: spec.client,
        })
    }

    /// Where requests come in.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }

    /// Takes in a frame of the engine's; [`Self::turn`] makes text of it.
    pub fn feed(&self, bytes: &[u8]) -> Result<(), WireError> {
        let (kind, bytes) = bytes.split_first().unwrap_or((&u8::MAX, &[]));
        match *kind {
            frame::STEP => {
                let sender = self.text.sender();
                let mut output = sender.spare();
                unpack_step(bytes, self.number, &mut output)?;
                sender.send(&mut output);
            }
            frame::STATS => *lock(&self.stats) = unpack_stats(bytes)?,
            kind => {
                return Err(WireError::Unknown {
                    name: "the kind of a frame",
                    known: "0 (step), 1 (counters)",
                    value: kind.into(),
                });
            }
        }
        Ok(())
    }

    /// Makes text of what was fed. Returns the time after which it must be called again whatever comes, if a
    /// reader's patience is limited.
    pub fn turn(&self) -> Option<Duration> {
        self.fail_late();
        self.text.sender().turn();
        self.text.sender().patience()
    }

    /// Has the engine forget cached prefixes before its next step.
    pub fn reset_prefix_cache(&self) {
        let _ = self.commands.push(Command::ResetPrefixCache);
    }

    /// Messages to send to the engine, in their order.
    pub fn take_messages(&self) -> Vec<Message> {
        let mut commands = Vec::new();
        lock(&self.outgoing).drain(&mut commands);
        pack_commands(commands, self.number)
    }

    /// Gives `deliver` all that is ready, one delta a stream.
    pub fn drain(&self, deliver: impl FnMut(u64, &mut StreamDelta)) {
        self.fail_late();
        self.text.drain(deliver);
    }

    /// The descriptor that is readable when there is something to drain or to send.
    pub fn wake(&self) -> &Wake {
        self.text.wake()
    }

    /// The engine's counters, as it last sent them.
    pub fn stats(&self) -> Stats {
        lock(&self.stats).clone()
    }

    /// How often readers had to be paused or given up.
    pub fn stall_counters(&self) -> &StallCounters {
        self.text.stall_counters()
    }

    /// The engine is lost: every stream ends with this error, and requests are refused.
    pub fn fail(&self, reason: &str) {
        self.halt.set(reason);
        self.turn();
        // What was meant for it must not reach a successor.
        let mut lost = Vec::new();
        lock(&self.outgoing).drain(&mut lost);
    }

    /// Another engine with the same limits is there: requests are taken again.
    pub fn reopen(&self) {
        self.halt.clear();
    }

    /// Ends the streams of an engine that is lost, those included that were opened while it was failing.
    fn fail_late(&self) {
        if let Some(reason) = self.halt.get() {
            let inbox = self.text.sender().inbox();
            let _ = inbox.push(TextMessage::Fail(reason));
        }
    }
}
