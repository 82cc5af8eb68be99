//! An engine with everything around it: inbox, text side, hub.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::arrays::StepArrays;
use crate::config::EngineConfig;
use crate::engine::{Command, Engine};
use crate::error::{RuntimeError, StepError};
use crate::frontend::Frontend;
use crate::grammar::GrammarCompiler;
use crate::inbox::{self, Inbox, Receiver};
use crate::output::{self, HubConsumer, Wake};
use crate::pipeline::{Pipeline, StallCounters, StallPolicy, StreamDelta, TextMessage};
use crate::prompt_logprobs::PromptRows;
use crate::stats::Stats;
use crate::step::{SpareOutputs, StepOutput};
use crate::sync::Arc as HubArc;
use crate::text::TextModel;

/// Deltas that a stream holds one by one before they merge.
const RING: usize = 8;

/// Where the text side runs.
enum TextSide {
    Thread(Option<JoinHandle<()>>),
    /// On the thread that drives the engine: after each commit, and when the reader makes room.
    Inline(Box<Mutex<Pipeline>>),
}

/// The thread that drives the engine holds this: plan, forward, commit.
pub struct Driver {
    engine: Engine,
    commands: Vec<Command>,
    output: StepOutput,
    spares: SpareOutputs,
}

/// A running engine. Its parts lock apart, so that no reader waits for a step.
pub struct Runtime {
    frontend: Frontend,
    driver: Mutex<Driver>,
    receiver: Mutex<Receiver<Command>>,
    consumer: Mutex<HubConsumer<StreamDelta>>,
    /// Shared as the hub shares it: under loom that is loom's `Arc`.
    wake: HubArc<Wake>,
    text: TextSide,
    stats: Mutex<Stats>,
    /// Choices that the engine has ended.
    ended: AtomicU64,
    stall: Arc<StallCounters>,
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic under a lock is reported where it happened; the state stays usable for shutting down.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runtime {
    /// Starts everything but the engine's own loop, which is the caller's.
    pub fn new(spec: RuntimeSpec) -> Result<Self, RuntimeError> {
        let eos = spec.eos.clone();
        let engine = Engine::new(spec.config.clone(), spec.eos)?;
        let (commands, receiver) = inbox::inbox();
        let (text, text_receiver) = inbox::inbox();
        let wake = HubArc::new(Wake::new()?);
        let waker: Inbox<TextMessage> = text.clone();
        let (producer, consumer) = output::hub(RING, wake.clone(), move || waker.wake());
        let opener = producer.opener();
        let stall = Arc::new(StallCounters::default());
        let spares = SpareOutputs::default();
        let pipeline = Pipeline::new(
            text_receiver,
            producer,
            commands.clone(),
            spec.policy,
            stall.clone(),
            spares.clone(),
        );
        let text_side = if spec.text_thread {
            let thread = std::thread::Builder::new().name("miniinfer-text".into());
            TextSide::Thread(Some(thread.spawn(move || pipeline.run())?))
        } else {
            TextSide::Inline(Box::new(Mutex::new(pipeline)))
        };
        let stats = engine.stats();
        Ok(Self {
            frontend: Frontend {
                config: spec.config,
                vocab_size: spec.vocab_size,
                grammars: GrammarCompiler::new(spec.model.clone(), spec.vocab_size, eos),
                model: spec.model,
                engine: commands,
                text,
                opener,
                next_id: AtomicU64::new(1),
                submitted: AtomicU64::new(0),
                stopped: OnceLock::new(),
            },
            driver: Mutex::new(Driver {
                engine,
                commands: Vec::new(),
                output: StepOutput::default(),
                spares,
            }),
            receiver: Mutex::new(receiver),
            consumer: Mutex::new(consumer),
            wake,
            text: text_side,
            stats: Mutex::new(stats),
            ended: AtomicU64::new(0),
            stall,
        })
    }

    /// Where requests come in.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }

    /// Plans a step: takes messages in, decides, writes the arrays. Returns the tokens in it; with 0 no
    /// commit follows.
    pub fn plan(&self, slot: usize, arrays: &StepArrays<'_>) -> Result<u32, StepError> {
        let mut driver = lock(&self.driver);
        self.take_commands(&mut driver);
        if let Some(reason) = self.frontend.stopped.get() {
            // Requests that were under way when the engine failed.
            driver.engine.fail_all(reason);
        }
        let tokens = driver.engine.plan(slot, arrays)?;
        self.hand_on(&mut driver);
        Ok(tokens)
    }

    /// Takes a step's tokens in and hands them on.
    pub fn commit(&self, slot: usize, arrays: &StepArrays<'_>) -> Result<(), StepError> {
        let mut driver = lock(&self.driver);
        driver.engine.commit(slot, arrays)?;
        self.hand_on(&mut driver);
        Ok(())
    }

    /// Looks at the engine of a planned step.
    pub fn with_engine<R>(&self, look: impl FnOnce(&Engine) -> R) -> R {
        look(&lock(&self.driver).engine)
    }

    /// Takes in the log-probabilities of a planned step's prompts.
    pub fn take_prompt_logprobs(
        &self,
        slot: usize,
        rows: &PromptRows<'_>,
    ) -> Result<(), StepError> {
        lock(&self.driver).engine.take_prompt_logprobs(slot, rows)
    }

    /// Ends the requests of a step whose forward failed.
    pub fn fail_step(&self, slot: usize, reason: &str) -> Result<(), StepError> {
        let mut driver = lock(&self.driver);
        driver.engine.fail_step(slot, reason)?;
        self.hand_on(&mut driver);
        Ok(())
    }

    /// Ends every request with an error and refuses new ones.
    pub fn fail(&self, reason: &str) {
        // A request that is being submitted now is refused, taken in below, or failed by the next plan.
        let _ = self.frontend.stopped.set(reason.into());
        let mut driver = lock(&self.driver);
        // Twice: a step under way must end before messages are taken in, and they may bring requests.
        driver.engine.fail_all(reason);
        self.take_commands(&mut driver);
        driver.engine.fail_all(reason);
        self.hand_on(&mut driver);
        drop(driver);
        self.interrupt();
    }

    /// Takes messages in, between steps: what a step under way computes for must live until its commit.
    fn take_commands(&self, driver: &mut Driver) {
        if driver.engine.in_flight() {
            return;
        }
        // The driving thread holds the receiver only while it sleeps in `wait`; what it wakes for, its own
        // next plan takes in.
        match self.receiver.try_lock() {
            Ok(mut receiver) => receiver.drain(&mut driver.commands),
            Err(TryLockError::Poisoned(poisoned)) => {
                poisoned.into_inner().drain(&mut driver.commands)
            }
            Err(TryLockError::WouldBlock) => return,
        };
        let Driver {
            engine, commands, ..
        } = driver;
        engine.apply(commands.drain(..));
    }

    fn hand_on(&self, driver: &mut Driver) {
        let Driver { engine, output, .. } = driver;
        engine.take_output(output);
        *lock(&self.stats) = engine.stats();
        self.ended.store(engine.num_ended(), Ordering::Release);
        if !driver.output.is_empty() {
            let step = std::mem::replace(&mut driver.output, driver.spares.take());
            let _ = self.frontend.text.push(TextMessage::Step(step));
        }
        if let TextSide::Inline(pipeline) = &self.text {
            lock(pipeline).turn();
        }
    }

    /// Sleeps until there is something to plan, without waking in between. False if the time ran out.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        if lock(&self.driver).engine.has_work() {
            return true;
        }
        lock(&self.receiver).wait(timeout)
    }

    /// Ends a `wait` at once.
    pub fn interrupt(&self) {
        self.frontend.engine.wake();
    }

    /// Whether requests are alive, messages under way included.
    pub fn has_requests(&self) -> bool {
        self.frontend.submitted.load(Ordering::Acquire) > self.ended.load(Ordering::Acquire)
    }

    /// Gives `deliver` all that is ready, one delta a stream.
    pub fn drain(&self, mut deliver: impl FnMut(u64, &mut StreamDelta)) {
        let mut consumer = lock(&self.consumer);
        loop {
            consumer.drain(&mut deliver);
            // What was held back for want of room comes at once where the text side is ours to run.
            let TextSide::Inline(pipeline) = &self.text else {
                return;
            };
            if !lock(pipeline).turn() {
                return;
            }
        }
    }

    /// The descriptor that is readable when there is something to drain.
    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Forgets cached prefixes before the next step.
    pub fn reset_prefix_cache(&self) {
        let _ = self.frontend.engine.push(Command::ResetPrefixCache);
    }

    /// Counters as of the last step; between steps, with the messages since then taken in.
    pub fn stats(&self) -> Stats {
        if let Ok(mut driver) = self.driver.try_lock()
            && !driver.engine.in_flight()
        {
            self.catch_up(&mut driver);
        }
        lock(&self.stats).clone()
    }

    /// How often readers had to be paused or given up.
    pub fn stall_counters(&self) -> &StallCounters {
        &self.stall
    }

    /// Verifies the engine's whole state, between steps with the messages taken in first.
    pub fn check(&self) -> Result<(), String> {
        let mut driver = lock(&self.driver);
        self.catch_up(&mut driver);
        driver.engine.check()
    }

    /// Takes messages in on a thread that may not be the driving one.
    fn catch_up(&self, driver: &mut Driver) {
        self.take_commands(driver);
        self.hand_on(driver);
        if driver.engine.has_work() {
            // The driving thread may be about to sleep for the message that was just taken.
            self.interrupt();
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = self.frontend.text.push(TextMessage::Close);
        if let TextSide::Thread(thread) = &mut self.text
            && let Some(thread) = thread.take()
        {
            let _ = thread.join();
        }
    }
}
