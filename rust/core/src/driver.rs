//! An engine as the thread that steps it holds it: messages in, plan, commit, and what it says handed on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use crate::arrays::StepArrays;
use crate::config::EngineConfig;
use crate::engine::{Command, Engine};
use crate::error::{ConfigError, StepError};
use crate::halt::Halt;
use crate::inbox::{self, Inbox, Receiver};
use crate::prompt_logprobs::PromptRows;
use crate::stats::Stats;
use crate::step::StepOutput;

/// Who hears what the engine says.
pub trait Listener: Send + Sync {
    /// Takes the output of a step, or of messages taken in; it may be empty. What is left in it is cleared.
    /// Called on the thread that drives the engine and under its lock: be quick.
    fn hear(&self, output: &mut StepOutput);
}

struct State {
    engine: Engine,
    commands: Vec<Command>,
    output: StepOutput,
}

/// An engine and its inbox. The parts lock apart, so that no reader waits for a step.
pub struct Driver {
    state: Mutex<State>,
    receiver: Mutex<Receiver<Command>>,
    inbox: Inbox<Command>,
    halt: Arc<Halt>,
    listener: Box<dyn Listener>,
    stats: Mutex<Stats>,
    /// Choices that the engine has ended.
    ended: AtomicU64,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic under a lock is reported where it happened; the state stays usable for shutting down.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver {
    /// An engine that hears from the inbox it comes with and speaks to what `listener` makes of that inbox.
    pub fn new<L: Listener + 'static, E: From<ConfigError>>(
        config: EngineConfig,
        eos: Vec<u32>,
        listener: impl FnOnce(&Inbox<Command>) -> Result<L, E>,
    ) -> Result<Self, E> {
        let engine = Engine::new(config, eos)?;
        let (inbox, receiver) = inbox::inbox();
        let listener = Box::new(listener(&inbox)?);
        let counters = engine.stats();
        let state = State {
            engine,
            commands: Vec::new(),
            output: StepOutput::default(),
        };
        Ok(Self {
            state: Mutex::new(state),
            receiver: Mutex::new(receiver),
            inbox,
            halt: Arc::default(),
            listener,
            stats: Mutex::new(counters),
            ended: AtomicU64::new(0),
        })
    }

    /// Where its messages go.
    pub fn inbox(&self) -> &Inbox<Command> {
        &self.inbox
    }

    /// Whether it has stopped.
    pub fn halt(&self) -> &Arc<Halt> {
        &self.halt
    }

    /// Plans a step: takes messages in, decides, writes the arrays. Returns the tokens in it; with 0 no
    /// commit follows.
    pub fn plan(&self, slot: usize, arrays: &StepArrays<'_>) -> Result<u32, StepError> {
        let mut state = lock(&self.state);
        self.take_commands(&mut state);
        if let Some(reason) = self.halt.get() {
            // Requests that were under way when the engine failed.
            state.engine.fail_all(&reason);
        }
        let tokens = state.engine.plan(slot, arrays)?;
        self.hand_on(&mut state);
        Ok(tokens)
    }

    /// Takes a step's tokens in and hands them on.
    pub fn commit(&self, slot: usize, arrays: &StepArrays<'_>) -> Result<(), StepError> {
        let mut state = lock(&self.state);
        state.engine.commit(slot, arrays)?;
        self.hand_on(&mut state);
        Ok(())
    }

    /// Looks at the engine of a planned step.
    pub fn with_engine<R>(&self, look: impl FnOnce(&Engine) -> R) -> R {
        look(&lock(&self.state).engine)
    }

    /// Takes in the log-probabilities of a planned step's prompts.
    pub fn take_prompt_logprobs(
        &self,
        slot: usize,
        rows: &PromptRows<'_>,
    ) -> Result<(), StepError> {
        lock(&self.state).engine.take_prompt_logprobs(slot, rows)
    }

    /// Ends the requests of a step whose forward failed.
    pub fn fail_step(&self, slot: usize, reason: &str) -> Result<(), StepError> {
        let mut state = lock(&self.state);
        state.engine.fail_step(slot, reason)?;
        self.hand_on(&mut state);
        Ok(())
    }

    /// Ends every request with an error and refuses new ones.
    pub fn fail(&self, reason: &str) {
        // A request that is being submitted now is refused, taken in below, or failed by the next plan.
        self.halt.set(reason);
        let mut state = lock(&self.state);
        // Twice: a step under way must end before messages are taken in, and they may bring requests.
        state.engine.fail_all(reason);
        self.take_commands(&mut state);
        state.engine.fail_all(reason);
        self.hand_on(&mut state);
        drop(state);
        self.interrupt();
    }

    /// Takes messages in.
    fn take_commands(&self, state: &mut State) {
        // The driving thread holds the receiver only while it sleeps in `wait`; what it wakes for, its own
        // next plan takes in.
        match self.receiver.try_lock() {
            Ok(mut receiver) => receiver.drain(&mut state.commands),
            Err(TryLockError::Poisoned(poisoned)) => {
                poisoned.into_inner().drain(&mut state.commands)
            }
            Err(TryLockError::WouldBlock) => return,
        };
        let State {
            engine, commands, ..
        } = state;
        engine.apply(commands.drain(..));
    }

    fn hand_on(&self, state: &mut State) {
        let State { engine, output, .. } = state;
        engine.take_output(output);
        *lock(&self.stats) = engine.stats();
        self.ended.store(engine.num_ended(), Ordering::Release);
        self.listener.hear(output);
    }

    /// Sleeps until there is something to plan, without waking in between. False if the time ran out.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        if lock(&self.state).engine.has_work() {
            return true;
        }
        lock(&self.receiver).wait(timeout)
    }

    /// Ends a `wait` at once.
    pub fn interrupt(&self) {
        self.inbox.wake();
    }

    /// Choices that the engine has ended.
    pub fn num_ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    /// Counters as of the last step; between steps, with the messages since then taken in.
    pub fn stats(&self) -> Stats {
        if let Ok(mut state) = self.state.try_lock() {
            self.catch_up(&mut state);
        }
        self.last_stats()
    }

    /// Counters as of the last step.
    pub fn last_stats(&self) -> Stats {
        lock(&self.stats).clone()
    }

    /// Verifies the engine's whole state, between steps with the messages taken in first.
    pub fn check(&self) -> Result<(), String> {
        let mut state = lock(&self.state);
        self.catch_up(&mut state);
        state.engine.check()
    }

    /// Takes messages in, between steps, on a thread that may not be the driving one.
    fn catch_up(&self, state: &mut State) {
        if state.engine.in_flight() {
            return;
        }
        self.take_commands(state);
        self.hand_on(state);
        if state.engine.has_work() {
            // The driving thread may be about to sleep for the message that was just taken.
            self.interrupt();
        }
    }
}
