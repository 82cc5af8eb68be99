//! The engine's state and what other threads may ask of it.
//!
//! A step is `plan`, the caller's forward pass, `commit`. What is decided lives in `schedule`, what is
//! written in `write`, what is read back in `commit`.

use std::sync::Arc;
use std::time::Instant;

use crate::block::{BlockManager, ExtraKey};
use crate::config::EngineConfig;
use crate::cost::StepCost;
use crate::edits::LogitEdits;
use crate::error::{ConfigError, StepError};
use crate::noise;
use crate::queue::{Kind, PrefillQueue};
use crate::request::{Arrival, NO_ROW, NewRequest, Request, RequestId, State};
use crate::stats::{Counters, Stats};
use crate::step::{EndReason, OutputEntry, StepOutput};
use crate::table::Table;

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
    pub num_tokens: u32,
    pub num_logprobs: Option<u32>,
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
    /// Requests given prefill tokens by the plan under way.
    pub(crate) grants: Vec<u32>,
    pub(crate) admission_closed: bool,
    /// No running request has a greater priority number.
    pub(crate) least_urgent: i32,
    /// Requests that were passed over too often, waiting at the time; ended ones are dropped when met.
    pub(crate) overdue: Vec<RequestId>,
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
    pub(crate) num_paused: usize,
    pub(crate) num_following: usize,
    pub(crate) num_ended: u64,
    pub(crate) output: StepOutput,
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
            grants: Vec::new(),
            admission_closed: false,
            least_urgent: i32::MIN,
            overdue: Vec::new(),
            skips: 0,
            refund: 0,
            growth: None,
            step: 0,
            next_sequence: 0,
            cost: StepCost::default(),
            counters: Counters::default(),
            deferred: Vec::new(),
            num_paused: 0,
            num_following: 0,
            num_ended: 0,
            output: StepOutput::default(),
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

    /// Whether a plan could find something to do: requests that are not paused, or messages.
    pub fn has_work(&self) -> bool {
        self.num_decoding() > 0 || self.queue.num_active() + self.queue.num_waiting() > 0
    }

    pub(crate) fn num_decoding(&self) -> usize {
        self.decoding.len() - self.decoding_holes as usize
    }

    pub(crate) fn num_running(&self) -> usize {
        self.rows.len() - self.free_rows.len()
    }

    /// What the engine has to say: tokens and ends since the last call. The text side takes it.
    pub fn take_output(&mut self, into: &mut StepOutput) {
        into.clear();
        std::mem::swap(into, &mut self.output);
    }

    /// Takes messages in. They come before each plan, from an [`crate::inbox`]; those that come while a
    /// step is in flight wait for its end, as the step's results are for the requests it was planned with.
    pub fn apply(&mut self, commands: impl IntoIterator<Item = Command>) {
        if self.slots.iter().any(|slot| slot.in_flight) {
            self.deferred.extend(commands);
            return;
        }
        for command in commands {
            match command {
                Command::Add {
                    first,
                    request,
                    arrival,
                } => self.add(first, &request, arrival),
                Command::Cancel(id) => self.end_by_id(id, Some(EndReason::Abort)),
                Command::Stop(id) => self.end_by_id(id, None),
                Command::Pause(id) => self.set_paused(id, true),
                Command::Resume(id) => self.set_paused(id, false),
                Command::Draft(id, drafts) => self.set_drafts(id, drafts),
                Command::ResetPrefixCache => self.blocks.reset(),
            }
        }
    }

    /// Takes in what came while a step was in flight.
    pub(crate) fn apply_deferred(&mut self) {
        if !self.deferred.is_empty() {
            let deferred = std::mem::take(&mut self.deferred);
            self.apply(deferred);
        }
    }

    fn add(&mut self, first: RequestId, request: &NewRequest, arrival: Arrival) {
        let n = request.n;
        let extra_keys: Arc<[ExtraKey]> = request.extra_keys.as_slice().into();
        let edits = LogitEdits::new(&request.prompt, &request.sampling, &self.eos);
        let max_len = self.max_len(request);
        for choice in 0..n {
            let mut params = request.sampling.clone();
            params.seed = noise::choice_seed(params.seed, choice);
            let tenant = self.queue.join(&request.tenant);
            let mut tokens = Vec::with_capacity(self.capacity(request.prompt.len(), max_len));
            tokens.extend_from_slice(&request.prompt);
            let sequence = self.next_sequence;
            self.next_sequence += 1;
            let clock = self.queue.clock(tenant);
            // Each choice has a hold of its own on the root.
            let root = self.blocks.root(&extra_keys);
            self.counters.requests += 1;
            let index = self.table.insert(Request {
                id: first + u64::from(choice),
                state: State::Following,
                prompt_len: tokens.len() as u32,
                tokens,
                computed: 0,
                scheduled: 0,
                drafts: Vec::new(),
                table: Vec::new(),
                registered: 0,
                extra_keys: extra_keys.clone(),
                root,
                chain: root,
                row: NO_ROW,
                synced: [0; 2],
                max_len,
                params,
                edits: edits.clone(),
                priority: request.priority,
                tenant,
                sequence,
                clock,
                key: 0,
                skipped_steps: 0,
                last_skip_step: u64::MAX,
                blocks_needed: 0,
                preemptions: 0,
                decode_at: 0,
                paused: false,
                cached_tokens: None,
                leader: (choice > 0).then_some(first),
                followers: Vec::new(),
                arrived: arrival.time,
                admitted: None,
                last_token: None,
            });
            if choice == 0 {
                self.table.get_mut(index).followers =
                    (1..u64::from(n)).map(|i| first + i).collect();
                self.enqueue(index);
            } else {
                self.num_following += 1;
            }
        }
    }

    fn max_len(&self, request: &NewRequest) -> u32 {
        let prompt = request.prompt.len() as u32;
        let wanted = request.sampling.max_tokens.unwrap_or(u32::MAX);
        prompt.saturating_add(wanted).min(self.config.max_model_len)
    }

    /// Room for the prompt and a first stretch of output, so that a decode step rarely allocates.
    fn capacity(&self, prompt: usize, max_len: u32) -> usize {
        (max_len as usize).min(prompt + 4 * self.config.block_size as usize)
    }

    /// Puts a request without a row into the waiting queue.
    pub(crate) fn enqueue(&mut self, index: u32) {
        let request = self.table.get_mut(index);
        request.state = State::Waiting;
        request.key = request.clock + u64::from(request.remaining());
        request.blocks_needed = 0;
        let place = (request.key, request.sequence, index);
        self.queue
            .insert(request.priority, request.tenant, Kind::Waiting, place);
    }

    /// Takes a request out of the queue it is in.
    pub(crate) fn dequeue(&mut self, index: u32, kind: Kind) {
        let request = self.table.get(index);
        let place = (request.key, request.sequence, index);
        self.queue
            .remove(request.priority, request.tenant, kind, place);
    }

    fn set_paused(&mut self, id: RequestId, paused: bool) {
        let Some(index) = self.table.find(id) else {
            return;
        };
        let request = self.table.get_mut(index);
        if std::mem::replace(&mut request.paused, paused) == paused {
            return;
        }
        match (request.state, paused) {
            (State::Decode, true) => {
                request.state = State::Paused;
                self.num_paused += 1;
                self.leave_decoding(index);
            }
            (State::Paused, false) => {
                self.num_paused -= 1;
                self.enter_decoding(index);
            }
            (State::Parked, false) => self.enqueue(index),
            // Elsewhere the flag is looked at when the request becomes ready to decode.
            _ => {}
        }
    }

    fn set_drafts(&mut self, id: RequestId, mut drafts: Vec<u32>) {
        if let Some(index) = self.table.find(id) {
            drafts.truncate(self.config.max_draft_tokens as usize);
            let request = self.table.get_mut(index);
            // Penalties change with each token: those behind a draft could not be verified in one go.
            if request.state == State::Decode && request.edits.is_none() {
                request.drafts = drafts;
            }
        }
    }

    pub(crate) fn enter_decoding(&mut self, index: u32) {
        let at = self.decoding.len() as u32;
        let request = self.table.get_mut(index);
        request.state = State::Decode;
        request.decode_at = at;
        self.decoding.push(index);
    }

    pub(crate) fn leave_decoding(&mut self, index: u32) {
        let at = self.table.get(index).decode_at as usize;
        debug_assert_eq!(self.decoding[at], index);
        self.decoding[at] = HOLE;
        self.decoding_holes += 1;
    }

    /// Ends a request in whatever state it is; `reason` is what its reader is told, `None` for nothing.
    fn end_by_id(&mut self, id: RequestId, reason: Option<EndReason>) {
        if let Some(index) = self.table.find(id) {
            if reason.is_none() {
                self.counters.finished_stop += 1;
            }
            self.end(index, reason);
        }
    }

    /// Ends a request and tells its reader.
    pub(crate) fn end(&mut self, index: u32, reason: Option<EndReason>) {
        if let Some(reason) = reason {
            self.count_end(&reason);
            let request = self.table.get(index);
            self.output.entries.push(OutputEntry {
                id: request.id,
                num_tokens: 0,
                num_logprobs: request.params.num_logprobs,
                cached_tokens: request.cached_tokens.unwrap_or(0),
                end: Some(reason),
            });
        }
        self.remove(index, Instant::now());
    }

    pub(crate) fn count_end(&mut self, reason: &EndReason) {
        let counters = &mut self.counters;
        *match reason {
            EndReason::Eos(_) | EndReason::StopToken(_) => &mut counters.finished_stop,
            EndReason::Length => &mut counters.finished_length,
            EndReason::Abort => &mut counters.finished_abort,
            EndReason::Error(_) => &mut counters.finished_error,
        } += 1;
    }

    /// Takes a request out of everything.
    pub(crate) fn remove(&mut self, index: u32, now: Instant) {
        match self.table.get(index).state {
            State::Waiting => self.dequeue(index, Kind::Waiting),
            State::Prefill => self.dequeue(index, Kind::Active),
            State::Decode => self.leave_decoding(index),
            State::Paused => self.num_paused -= 1,
            State::Following => self.num_following -= 1,
            State::Parked => {}
        }
        let request = self.table.remove(index);
        self.num_ended += 1;
        self.blocks.release(&request.table);
        self.blocks.release_root(request.root);
        self.free_row(request.row);
        self.queue.leave(request.tenant);
        self.counters
            .e2e_request_latency
            .observe(now - request.arrived);
        self.hand_over(&request.followers);
    }

    fn free_row(&mut self, row: u32) {
        if row != NO_ROW {
            self.rows[row as usize] = HOLE;
            self.free_rows.push(row);
        }
    }

    /// The leader of these choices is gone before the prompt was computed: the next one leads.
    fn hand_over(&mut self, followers: &[RequestId]) {
        let find = |&id: &RequestId| self.table.find(id);
        let Some(first) = followers.iter().position(|id| find(id).is_some()) else {
            return;
        };
        let (leader, rest) = (followers[first], &followers[first + 1..]);
        for id in rest {
            if let Some(index) = self.table.find(*id) {
                self.table.get_mut(index).leader = Some(leader);
            }
        }
        let index = self.table.find(leader).expect("invariant: just found");
        let request = self.table.get_mut(index);
        request.leader = None;
        request.followers = rest.to_vec();
        self.num_following -= 1;
        self.enqueue(index);
    }

    /// The prompt of these choices is computed: they may be admitted.
    pub(crate) fn release_followers(&mut self, followers: Vec<RequestId>) {
        for id in followers {
            if let Some(index) = self.table.find(id) {
                self.num_following -= 1;
                self.enqueue(index);
            }
        }
    }

    /// Takes everything from a running request but its tokens; it will be computed again.
    pub(crate) fn preempt(&mut self, index: u32) {
        match self.table.get(index).state {
            State::Prefill => self.dequeue(index, Kind::Active),
            State::Decode => self.leave_decoding(index),
            State::Paused => self.num_paused -= 1,
            other => {
                unreachable!("invariant: only requests with a row are preempted, not {other:?}")
            }
        }
        let request = self.table.get_mut(index);
        let mut table = std::mem::take(&mut request.table);
        let row = std::mem::replace(&mut request.row, NO_ROW);
        self.refund += std::mem::take(&mut request.scheduled);
        self.growth = None;
        request.computed = 0;
        request.registered = 0;
        request.chain = request.root;
        request.drafts.clear();
        let paused = request.paused;
        request.preemptions += u32::from(!paused);
        self.blocks.release(&table);
        table.clear();
        self.table.get_mut(index).table = table;
        self.free_row(row);
        self.counters.preemptions += 1;
        if paused {
            let request = self.table.get_mut(index);
            request.state = State::Parked;
            let followers = std::mem::take(&mut request.followers);
            self.hand_over(&followers);
        } else {
            self.enqueue(index);
        }
    }

    /// Ends the requests of a step whose forward failed; the others go on.
    pub fn fail_step(&mut self, slot: usize, reason: &str) -> Result<(), StepError> {
        self.expect(slot, "fail_step", true)?;
        self.slots[slot].in_flight = false;
        let reason: Arc<str> = reason.into();
        let planned = std::mem::take(&mut self.slots[slot].planned);
        for entry in &planned {
            self.end(entry.index, Some(EndReason::Error(reason.clone())));
        }
        self.slots[slot].planned = planned;
        self.apply_deferred();
        Ok(())
    }

    /// Ends every request: the engine cannot go on.
    pub fn fail_all(&mut self, reason: &str) {
        for slot in &mut self.slots {
            slot.in_flight = false;
        }
        self.apply_deferred();
        let reason: Arc<str> = reason.into();
        let indices: Vec<u32> = self.table.iter().map(|(index, _)| index).collect();
        for index in indices {
            self.end(index, Some(EndReason::Error(reason.clone())));
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
        Stats {
            counters: self.counters.clone(),
            num_running: running,
            num_waiting: self.table.len() - running,
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
