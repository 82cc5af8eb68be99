//! The engine's state and what other threads may ask of it.
//!
//! A step is `plan`, the caller's forward pass, `commit`. Who gets tokens is decided in `schedule`, who gets
//! a row and blocks in `admit`; what is written lives in `write`, what is read back in `commit`, and how a
//! request goes from state to state in `lifecycle`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::block::{BlockId, BlockManager};
use crate::config::EngineConfig;
use crate::cost::StepCost;
use crate::error::{ConfigError, StepError};
use crate::grammar::MaskWorkers;
use crate::overlap::{Flight, Overlap};
use crate::queue::PrefillQueue;
use crate::request::{Arrival, NewRequest, RequestId};
use crate::stats::{Counters, Stats};
use crate::step::{EndReason, StepOutput};
use crate::table::{TOGETHER, Table};

/// A message to the engine; those that other threads send take effect at the next plan.
#[derive(Debug)]
pub enum Command {
    /// New requests: choice i of it has the id `first + i`.
    Add {
        /// Id of the first choice.
        first: RequestId,
        /// What is asked.
        request: Box<NewRequest>,
        /// When it was.
        arrival: Arrival,
    },
    /// End a request; its reader is told. Unknown ids are ignored.
    Cancel(RequestId),
    /// End all requests with ids in the range: the process that asked for them is gone.
    CancelRange(Range<RequestId>),
    /// A stop string was found in the text of a request: end it without another word.
    Stop(RequestId),
    /// The reader is behind: keep the request's blocks but do not schedule it.
    Pause(RequestId),
    /// The reader has caught up.
    Resume(RequestId),
    /// Tokens to verify for a decoding request in its next step.
    Draft(RequestId, Vec<u32>),
    /// Forget all cached prefixes.
    ResetPrefixCache,
}

/// One request's share of a planned step.
#[derive(Clone, Copy)]
pub(crate) struct Planned {
    pub index: u32,
    pub tokens: u32,
    pub samples: u32,
    pub first_sample: u32,
}

/// What a slot is doing.
#[derive(Default)]
pub(crate) struct Slot {
    pub planned: Vec<Planned>,
    pub in_flight: bool,
    /// When it was planned.
    pub step: u64,
    /// Whether it is noted which requests the step in flight has.
    pub noted: bool,
    pub num_tokens: u32,
    pub num_logprobs: Option<u32>,
    /// Rows of logits with a mask.
    pub num_masks: usize,
    pub started: Option<Instant>,
}

/// A hole in the list of decoding requests, closed at the next plan.
pub(crate) const HOLE: u32 = u32::MAX;

/// Scheduler, blocks and requests of one model. Driven by one thread.
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) eos: Vec<u32>,
    pub(crate) table: Table,
    pub(crate) blocks: BlockManager,
    pub(crate) queue: PrefillQueue,
    /// Table indices of decoding requests, in order of their start.
    pub(crate) decoding: Vec<u32>,
    pub(crate) decoding_holes: u32,
    /// Table index by row, `HOLE` for a free row.
    pub(crate) rows: Vec<u32>,
    pub(crate) free_rows: Vec<u32>,
    pub(crate) slots: [Slot; 2],
    pub(crate) overlap: Overlap,
    /// Requests given prefill tokens by the plan under way.
    pub(crate) grants: Vec<u32>,
    /// Decoding requests whose blocks are full, if there are no drafts; maybe some that have left since.
    pub(crate) growing: Vec<u32>,
    pub(crate) admission_closed: bool,
    /// No running request has a greater priority number.
    pub(crate) least_urgent: i32,
    /// By priority, a waiting request that was passed over too often.
    pub(crate) overdue: BTreeMap<i32, RequestId>,
    /// Requests that the plan under way may still pass over.
    pub(crate) skips: u32,
    /// Tokens of decodes that were preempted in the plan under way.
    pub(crate) refund: u32,
    /// Blocks that the decoding requests may still come to need, if the plan under way has asked.
    pub(crate) growth: Option<u32>,
    pub(crate) step: u64,
    pub(crate) next_sequence: u64,
    pub(crate) cost: StepCost,
    pub(crate) counters: Counters,
    /// Messages that came while a step was in flight.
    pub(crate) deferred: Vec<Command>,
    /// Messages that are being taken in.
    together: Vec<Command>,
    pub(crate) num_paused: usize,
    pub(crate) num_following: usize,
    pub(crate) num_ended: u64,
    /// Cached blocks of the request that is being admitted.
    pub(crate) matched: Vec<BlockId>,
    pub(crate) output: StepOutput,
    pub(crate) mask_workers: MaskWorkers,
}

impl Engine {
    /// An engine for a model whose end-of-sequence ids are `eos`.
    pub fn new(config: EngineConfig, eos: Vec<u32>) -> Result<Self, ConfigError> {
        config.validate()?;
        let rows = config.max_num_seqs;
        Ok(Self {
            blocks: BlockManager::new(
                config.num_blocks,
                config.block_size,
                config.enable_prefix_caching,
            ),
            eos,
            table: Table::default(),
            queue: PrefillQueue::default(),
            decoding: Vec::new(),
            decoding_holes: 0,
            rows: vec![HOLE; rows as usize],
            free_rows: (0..rows).rev().collect(),
            slots: Default::default(),
            overlap: Overlap {
                flights: vec![Flight::default(); rows as usize],
                ..Overlap::default()
            },
            grants: Vec::new(),
            growing: Vec::new(),
            admission_closed: false,
            least_urgent: i32::MIN,
            overdue: BTreeMap::new(),
            skips: 0,
            refund: 0,
            growth: None,
            step: 0,
            next_sequence: 0,
            cost: StepCost::default(),
            counters: Counters::default(),
            deferred: Vec::new(),
            together: Vec::new(),
            num_paused: 0,
            num_following: 0,
            num_ended: 0,
            matched: Vec::new(),
            output: StepOutput::default(),
            mask_workers: MaskWorkers::default(),
            config,
        })
    }

    /// The limits it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Live requests, in any state.
    pub fn num_requests(&self) -> usize {
        self.table.len()
    }

    /// Requests that have ended, each choice counted.
    pub fn num_ended(&self) -> u64 {
        self.num_ended
    }

    /// Whether a planned step waits for its commit.
    pub fn in_flight(&self) -> bool {
        self.slots.iter().any(|slot| slot.in_flight)
    }

    /// Whether a plan could find something to do: requests that are not paused, or messages.
    pub fn has_work(&self) -> bool {
        self.num_decoding() > 0 || self.queue.num_active() + self.queue.num_waiting() > 0
    }

    pub(crate) fn num_decoding(&self) -> usize {
        self.decoding.len() - self.decoding_holes as usize
    }

    pub(crate) fn num_running(&self) -> usize {
        self.rows.len() - self.free_rows.len() - self.overlap.num_gone
    }

    /// What the engine has to say: tokens and ends since the last call. The text side takes it.
    pub fn take_output(&mut self, into: &mut StepOutput) {
        into.clear();
        std::mem::swap(into, &mut self.output);
    }

    /// Takes messages in. They come before each plan, from an [`crate::inbox`]; those that come while a
    /// step is in flight wait for its end, or for the next plan if that comes before.
    pub fn apply(&mut self, commands: impl IntoIterator<Item = Command>) {
        if self.in_flight() {
            self.deferred.extend(commands);
            return;
        }
        self.take_all(commands);
    }

    /// Takes messages in, now.
    pub(crate) fn take_all(&mut self, commands: impl IntoIterator<Item = Command>) {
        let now = Instant::now();
        let mut commands = commands.into_iter();
        let mut together = std::mem::take(&mut self.together);
        loop {
            together.extend(commands.by_ref().take(TOGETHER));
            if together.is_empty() {
                break;
            }
            let ending = together.iter().filter_map(|command| match command {
                Command::Cancel(id) | Command::Stop(id) => self.table.find(*id),
                _ => None,
            });
            self.table.warm_whole(ending);
            for command in together.drain(..) {
                self.take_in(command, now);
            }
        }
        self.together = together;
    }

    fn take_in(&mut self, command: Command, now: Instant) {
        match command {
            Command::Add {
                first,
                request,
                arrival,
            } => self.add(first, &request, arrival),
            Command::Cancel(id) => self.end_by_id(id, Some(EndReason::Abort), now),
            Command::CancelRange(ids) => self.end_range(&ids, now),
            Command::Stop(id) => self.end_by_id(id, None, now),
            Command::Pause(id) => self.set_paused(id, true),
            Command::Resume(id) => self.set_paused(id, false),
            Command::Draft(id, drafts) => self.set_drafts(id, drafts),
            Command::ResetPrefixCache => self.blocks.reset(),
        }
    }

    fn end_range(&mut self, ids: &Range<RequestId>, now: Instant) {
        let live = self.table.iter().map(|(_, request)| request.id);
        let gone: Vec<RequestId> = live.filter(|id| ids.contains(id)).collect();
        for id in gone {
            self.end_by_id(id, Some(EndReason::Abort), now);
        }
    }

    /// Takes in what came while a step was in flight, unless another is.
    pub(crate) fn apply_deferred(&mut self) {
        if !self.deferred.is_empty() && !self.in_flight() {
            let deferred = std::mem::take(&mut self.deferred);
            self.apply(deferred);
        }
    }

    /// Ends the requests of a step whose forward failed; the others go on.
    pub fn fail_step(&mut self, slot: usize, reason: &str) -> Result<(), StepError> {
        let noted = self.end_flight(slot, "fail_step")?;
        let reason: Arc<str> = reason.into();
        let planned = std::mem::take(&mut self.slots[slot].planned);
        let now = Instant::now();
        for entry in &planned {
            if !(noted && self.land(slot, entry)) {
                self.end(entry.index, Some(EndReason::Error(reason.clone())), now);
            }
        }
        self.slots[slot].planned = planned;
        self.apply_deferred();
        Ok(())
    }

    /// Ends every request: the engine cannot go on.
    pub fn fail_all(&mut self, reason: &str) {
        self.ground();
        self.apply_deferred();
        let reason: Arc<str> = reason.into();
        let indices: Vec<u32> = self.table.iter().map(|(index, _)| index).collect();
        let now = Instant::now();
        for index in indices {
            self.end(index, Some(EndReason::Error(reason.clone())), now);
        }
    }

    pub(crate) fn expect(
        &self,
        slot: usize,
        call: &'static str,
        in_flight: bool,
    ) -> Result<(), StepError> {
        let state = self.slots.get(slot).ok_or(StepError::NoSuchSlot { slot })?;
        let names = ["free", "in flight"];
        if state.in_flight != in_flight {
            return Err(StepError::SlotState {
                slot,
                call,
                actual: names[usize::from(state.in_flight)],
                needed: names[usize::from(in_flight)],
            });
        }
        Ok(())
    }

    /// Counters and the state of the moment.
    pub fn stats(&self) -> Stats {
        let blocks = self.blocks.counters();
        let running = self.num_running();
        let waiting = self.table.len() - running;
        Stats {
            counters: self.counters.clone(),
            num_running: running,
            num_waiting: waiting,
            num_deferred: waiting - self.queue.num_waiting(),
            num_paused: self.num_paused,
            blocks_used: self.blocks.num_blocks() - self.blocks.num_free(),
            blocks_cached: self.blocks.num_cached_free(),
            blocks_total: self.blocks.num_blocks(),
            prefix_queries: blocks.queries_tokens,
            prefix_hits: blocks.hit_tokens,
            prefix_evictions: blocks.evictions,
        }
    }
}
