//! A request's way through the engine's lists: in, from state to state, out.

use std::sync::Arc;
use std::time::Instant;

use crate::block::ExtraKey;
use crate::edits::LogitEdits;
use crate::engine::{Engine, HOLE};
use crate::noise;
use crate::prompt_logprobs::PromptLogprobs;
use crate::queue::Kind;
use crate::request::{Arrival, NO_LEADER, NO_ROW, NewRequest, Request, RequestId, State};
use crate::step::{EndReason, OutputEntry};

impl Engine {
    pub(crate) fn add(&mut self, first: RequestId, request: &NewRequest, arrival: Arrival) {
        let n = request.n;
        let extra_keys: Arc<[ExtraKey]> = match request.extra_keys.as_slice() {
            // Shared by all that have none: nothing is allocated.
            [] => Arc::default(),
            keys => keys.into(),
        };
        let max_len = self.max_len(request);
        for choice in 0..n {
            let mut params = request.sampling.clone();
            params.seed = noise::choice_seed(params.seed, choice);
            let edits = LogitEdits::new(&request.prompt, &params, &request.limits, &self.eos);
            let tenant = self.queue.join(&request.tenant);
            let mut tokens = Vec::with_capacity(self.capacity(request.prompt.len(), max_len));
            tokens.extend_from_slice(&request.prompt);
            let sequence = self.next_sequence;
            self.next_sequence += 1;
            let clock = self.queue.clock(tenant);
            // Each choice has a hold of its own on the root.
            let root = self.blocks.root(&extra_keys);
            self.counters.requests += 1;
            // The choices have one prompt: it is reported with the first.
            let prompt_logprobs = request
                .num_prompt_logprobs
                .filter(|_| choice == 0)
                .map(|k| {
                    Box::new(PromptLogprobs {
                        id: first,
                        top_width: k as usize,
                        ..PromptLogprobs::default()
                    })
                });
            let index = self.table.insert(Request {
                id: first + u64::from(choice),
                state: State::Following,
                prompt_len: tokens.len() as u32,
                tokens,
                computed: 0,
                scheduled: 0,
                drafts: Box::default(),
                drafter: None,
                table: Vec::new(),
                registered: 0,
                extra_keys: extra_keys.clone(),
                root,
                chain: root,
                row: NO_ROW,
                synced: [0; 2],
                max_len,
                params,
                edits,
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
                cached_tokens: 0,
                leader: if choice > 0 { first } else { NO_LEADER },
                last_id: 0,
                last_block: 0,
                followers: Box::default(),
                arrived: arrival.time,
                admitted: None,
                last_token: None,
                first_token: None,
                prompt_logprobs,
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
        request.key = request.turn_key();
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

    pub(crate) fn set_paused(&mut self, id: RequestId, paused: bool) {
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

    pub(crate) fn set_drafts(&mut self, id: RequestId, mut drafts: Vec<u32>) {
        if let Some(index) = self.table.find(id) {
            drafts.truncate(self.config.max_draft_tokens as usize);
            let flying = self.is_flying(self.table.get(index));
            let request = self.table.get_mut(index);
            // Penalties change with each token: those behind a draft could not be verified in one go.
            // A step in flight has drafts of its own.
            if request.state == State::Decode && request.edits.is_none() && !flying {
                request.drafts = drafts.into();
            }
        }
    }

    pub(crate) fn enter_decoding(&mut self, index: u32) {
        let at = self.decoding.len() as u32;
        let request = self.table.get_mut(index);
        request.state = State::Decode;
        request.decode_at = at;
        request.note_last();
        self.decoding.push(index);
        self.note_growth(index);
    }

    /// Remembers a decoding request whose blocks have no room for its next token.
    pub(crate) fn note_growth(&mut self, index: u32) {
        let block_size = self.config.block_size as usize;
        let request = self.table.get(index);
        if request.tokens.len() > request.table.len() * block_size
            && self.config.max_draft_tokens == 0
        {
            self.growing.push(index);
        }
    }

    pub(crate) fn leave_decoding(&mut self, index: u32) {
        let at = self.table.get(index).decode_at as usize;
        debug_assert_eq!(self.decoding[at], index);
        self.decoding[at] = HOLE;
        self.decoding_holes += 1;
    }

    /// Ends a request in whatever state it is; `reason` is what its reader is told, `None` for nothing.
    pub(crate) fn end_by_id(&mut self, id: RequestId, reason: Option<EndReason>, now: Instant) {
        if let Some(index) = self.table.find(id) {
            if reason.is_none() {
                self.counters.finished_stop += 1;
            }
            self.end(index, reason, now);
        }
    }

    /// Ends a request and tells its reader.
    pub(crate) fn end(&mut self, index: u32, reason: Option<EndReason>, now: Instant) {
        if let Some(reason) = reason {
            self.count_end(&reason);
            let request = self.table.get(index);
            self.output.entries.push(OutputEntry {
                id: request.id,
                num_tokens: 0,
                num_logprobs: request.params.num_logprobs,
                cached_tokens: request.cached_tokens,
                end: Some(reason),
            });
        }
        self.remove(index, now);
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
            State::Gone => unreachable!("invariant: a request ends once"),
        }
        let flying = self.is_flying(self.table.get(index));
        let request = self.table.get_mut(index);
        self.num_ended += 1;
        self.blocks.release_root(request.root);
        self.queue.leave(request.tenant);
        self.counters
            .e2e_request_latency
            .observe(now - request.arrived);
        if let Some(admitted) = request.admitted {
            self.counters.request_inference_time.observe(now - admitted);
        }
        if let Some(first) = request.first_token {
            self.counters.request_decode_time.observe(now - first);
            let later = (request.tokens.len() as u32).saturating_sub(request.prompt_len + 1);
            if later > 0 {
                self.counters
                    .request_time_per_output_token
                    .observe((now - first) / later);
            }
        }
        let (priority, id) = (request.priority, request.id);
        let followers = std::mem::take(&mut request.followers);
        if flying {
            request.state = State::Gone;
            self.overlap.num_gone += 1;
            self.table.forget(id);
        } else {
            self.release(index);
        }
        self.no_more_overdue(priority, id);
        self.hand_over(&followers);
    }

    pub(crate) fn free_row(&mut self, row: u32) {
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
                self.table.get_mut(index).leader = leader;
            }
        }
        let index = self.table.find(leader).expect("invariant: just found");
        let request = self.table.get_mut(index);
        request.leader = NO_LEADER;
        request.followers = rest.into();
        self.num_following -= 1;
        self.enqueue(index);
    }

    /// The prompt of these choices is computed: they may be admitted.
    pub(crate) fn release_followers(&mut self, followers: Box<[RequestId]>) {
        for id in followers {
            if let Some(index) = self.table.find(id) {
                self.num_following -= 1;
                self.enqueue(index);
            }
        }
    }

    /// Takes everything from a running request but its tokens; it will be computed again.
    pub(crate) fn preempt(&mut self, index: u32) {
        let state = self.table.get(index).state;
        match state {
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
        let scheduled = std::mem::take(&mut request.scheduled);
        // A decoding request has its token without having been looked at.
        self.refund += scheduled.max(u32::from(state == State::Decode));
        self.growth = None;
        request.computed = 0;
        request.registered = 0;
        request.chain = request.root;
        request.drafts = Box::default();
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
}
