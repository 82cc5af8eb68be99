//! The engine's end: messages of several clients in, frames for each of them out.

use std::sync::Arc;

use super::client_ids;
use super::command::unpack_message;
use super::error::WireError;
use super::outbox::{Addressed, Outbox};
use crate::config::EngineConfig;
use crate::driver::Driver;
use crate::engine::Command;
use crate::error::{ConfigError, SubmitError};
use crate::frontend::check_tokens;
use crate::grammar::{GrammarCompiler, GrammarSpec};
use crate::text::TextModel;

/// An engine that is spoken to in bytes.
pub struct Host {
    driver: Arc<Driver>,
    outbox: Arc<Outbox>,
    config: EngineConfig,
    vocab_size: u32,
    grammars: GrammarCompiler,
}

impl Host {
    /// An engine for a model whose end-of-sequence ids are `eos`. Token ids below `vocab_size` may be given and
    /// sampled.
    pub fn new(
        config: EngineConfig,
        eos: Vec<u32>,
        vocab_size: u32,
        model: Arc<TextModel>,
    ) -> Result<Self, ConfigError> {
        let grammars = GrammarCompiler::new(model, vocab_size, eos.clone());
        let outbox = Arc::new(Outbox::new());
        let driver = Driver::new(config.clone(), eos, |_| {
            Ok::<_, ConfigError>(outbox.clone())
        })?;
        Ok(Self {
            driver: Arc::new(driver),
            outbox,
            config,
            vocab_size,
            grammars,
        })
    }

    /// What the thread that steps holds.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// A client is there: it may send messages, and gets frames.
    pub fn connect(&self, client: u16) {
        self.outbox.connect(client);
        // It is told the counters even if the engine has nothing to do.
        self.driver.interrupt();
    }

    /// A client is gone: its requests end, and nothing is kept for it.
    pub fn disconnect(&self, client: u16) {
        if self.outbox.disconnect(client) {
            let command = Command::CancelRange(client_ids(client));
            let _ = self.driver.inbox().push(command);
        }
    }

    /// Takes in a message. A request's grammar, which its client has compiled and found good, is compiled here
    /// again unless it is known: call this on a thread that nobody waits for in a step. An error means that the client speaks another language: nothing it says can be
    /// relied on, so it should be disconnected.
    pub fn feed(&self, client: u16, kind: u8, bytes: &[u8]) -> Result<(), WireError> {
        let compile =
            |spec: &GrammarSpec| Ok(self.grammars.compile(spec).map_err(SubmitError::from)?);
        let commands = unpack_message(kind, bytes, client, &compile)?;
        for command in &commands {
            self.check(client, command)?;
        }
        for command in commands {
            let _ = self.driver.inbox().push(command);
        }
        Ok(())
    }

    /// All frames that wait for their clients. `idle`: the last plan found nothing to do.
    pub fn take_frames(&self, idle: bool) -> Vec<Addressed> {
        self.outbox.take(idle, || self.driver.last_stats())
    }

    fn check(&self, client: u16, command: &Command) -> Result<(), WireError> {
        let Command::Add { first, request, .. } = command else {
            return Ok(());
        };
        request.validate(self.config.max_model_len, self.config.max_logprobs)?;
        check_tokens(request, self.vocab_size)?;
        let ids = *first..first + u64::from(request.n);
        if self.outbox.use_ids(client, ids) {
            return Ok(());
        }
        Err(WireError::Range {
            name: "the id of a request",
            limit: "above those before it",
            value: *first,
        })
    }
}
