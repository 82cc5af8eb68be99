//! Taking a step's results in: append, stop, register full blocks, hand on.

use std::time::Instant;

use crate::arrays::StepArrays;
use crate::engine::{Engine, Planned};
use crate::error::StepError;
use crate::grammar::Verdict;
use crate::queue::Kind;
use crate::request::{State, StopKind};
use crate::step::{EndReason, OutputEntry};
use crate::table::TOGETHER;

/// What one sampled token means for its request.
enum Fate {
    Continue,
    End(EndReason),
}

impl Engine {
    /// Takes in the tokens that were sampled for a planned step. What there is to hand on is then in
    /// [`Engine::take_output`].
    pub fn commit(&mut self, slot: usize, arrays: &StepArrays<'_>) -> Result<(), StepError> {
        arrays.check(&self.config)?;
        let noted = self.end_flight(slot, "commit")?;
        let now = Instant::now();
        let planned = std::mem::take(&mut self.slots[slot].planned);
        self.output.top_width = self.slots[slot]
            .num_logprobs
            .map_or(0, |_| self.config.max_logprobs as usize);
        self.output.entries.reserve(planned.len());
        self.output.tokens.reserve(planned.len());
        let mut latency = Vec::new();
        for together in planned.chunks(TOGETHER) {
            self.table
                .warm_with_tokens(together.iter().map(|entry| entry.index));
            for entry in together {
                if !(noted && self.land(slot, entry)) {
                    self.commit_one(entry, arrays, slot, now, &mut latency);
                }
            }
        }
        self.observe_latency(now, latency);
        let state = &mut self.slots[slot];
        state.planned = planned;
        if let Some(started) = state.started.take() {
            self.cost.observe(state.num_tokens, now - started);
        }
        // A step planned meanwhile begins now.
        if let Some(started) = &mut self.slots[1 - slot].started {
            *started = now;
        }
        self.apply_deferred();
        Ok(())
    }

    fn commit_one(
        &mut self,
        planned: &Planned,
        arrays: &StepArrays<'_>,
        slot: usize,
        now: Instant,
        latency: &mut Vec<(Instant, u64)>,
    ) {
        let index = planned.index;
        let request = self.table.get_mut(index);
        request.scheduled = 0;
        if planned.samples == 0 {
            request.computed += planned.tokens;
            self.register_full_blocks(index);
            self.requeue_active(index);
            return;
        }
        let prefilling = request.state == State::Prefill;
        let known = request.tokens.len() as u32;
        let drafts = if self.config.max_draft_tokens > 0 {
            std::mem::take(&mut request.drafts)
        } else {
            Box::default()
        };
        let before = request.computed;
        let first_token = self.output.tokens.len();
        let mut fate = Fate::Continue;
        let mut kept = 0;
        for row in 0..planned.samples {
            let sample = (planned.first_sample + row) as usize;
            fate = self.append(index, sample, arrays, slot);
            kept += u32::from(self.output.tokens.len() > first_token + kept as usize);
            let confirmed = drafts.get(row as usize).map(|&d| d as i32);
            if matches!(fate, Fate::End(_)) || confirmed != Some(arrays.sampled[sample].get()) {
                break;
            }
        }
        // KV is right for the known tokens and for the drafts that were confirmed.
        let request = self.table.get_mut(index);
        let confirmed = kept.saturating_sub(1);
        request.computed = known + confirmed;
        debug_assert!(request.computed <= before + planned.tokens);
        self.counters.accepted_tokens += u64::from(confirmed);
        self.counters.generation_tokens += u64::from(kept);
        self.give_back_surplus_blocks(index, !drafts.is_empty());
        if matches!(fate, Fate::End(EndReason::Error(_))) {
            // Its KV may be as bad as its logits: nobody may meet it in the cache.
            self.blocks.distrust(&self.table.get(index).table);
        } else {
            self.register_full_blocks(index);
        }
        self.hand_on(index, kept, now, latency);
        match fate {
            Fate::End(reason) => {
                self.count_end(&reason);
                let entry = self.output.entries.last_mut();
                entry.expect("invariant: just handed on").end = Some(reason);
                self.leave_prefill(index, prefilling);
                self.remove(index, now);
            }
            Fate::Continue => {
                self.leave_prefill(index, prefilling);
                if prefilling {
                    self.start_decoding(index);
                } else {
                    self.note_growth(index);
                }
            }
        }
    }

    /// Appends one sampled token and says whether the request goes on.
    fn append(&mut self, index: u32, sample: usize, arrays: &StepArrays<'_>, slot: usize) -> Fate {
        let sampled = arrays.sampled[sample].get();
        if sampled < 0 {
            self.counters.corrupted += 1;
            let reason = "the model produced logits that are not finite";
            return Fate::End(EndReason::Error(reason.into()));
        }
        let token = sampled as u32;
        let request = self.table.get_mut(index);
        request.tokens.push(token);
        request.last_id = token;
        let mut complete = false;
        if let Some(edits) = request.edits.as_deref_mut() {
            edits.count(token);
            let output = &request.tokens[request.prompt_len as usize..];
            match edits.accept(output, self.eos.contains(&token)) {
                Ok(verdict) => complete = verdict == Verdict::Complete,
                Err(reason) => return Fate::End(EndReason::Error(reason.into())),
            }
        }
        // A complete grammar ends the answer even where `ignore_eos` and `min_tokens` would not.
        let stop = request
            .is_stop_token(token, &self.eos)
            .or(complete.then_some(StopKind::Eos));
        let full = request.tokens.len() as u32 >= request.max_len;
        self.output.tokens.push(token);
        if self.slots[slot].num_logprobs.is_some() {
            let width = self.output.top_width;
            self.output.logprobs.push(arrays.logprob[sample].get());
            self.output.ranks.push(arrays.rank[sample].get() as u32);
            let top = sample * width..(sample + 1) * width;
            let ids = arrays.top_ids[top.clone()].iter().map(|id| id.get() as u32);
            self.output.top_ids.extend(ids);
            self.output
                .top_logprobs
                .extend(arrays.top_logprobs[top].iter().map(std::cell::Cell::get));
        }
        match stop {
            Some(StopKind::Eos) => Fate::End(EndReason::Eos(token)),
            Some(StopKind::Token) => Fate::End(EndReason::StopToken(token)),
            None if full => Fate::End(EndReason::Length),
            None => Fate::Continue,
        }
    }

    /// Gives the text side its entry and notes the times.
    fn hand_on(&mut self, index: u32, kept: u32, now: Instant, latency: &mut Vec<(Instant, u64)>) {
        let request = self.table.get_mut(index);
        self.output.entries.push(OutputEntry::BLANK);
        let entry = self.output.entries.last_mut();
        let entry = entry.expect("invariant: just pushed");
        entry.id = request.id;
        entry.num_tokens = kept;
        entry.num_logprobs = request.params.num_logprobs;
        entry.cached_tokens = request.cached_tokens;
        match request.last_token.replace(now) {
            // Requests of one batch share their latency: count equal neighbours together.
            Some(last) => match latency.last_mut() {
                Some((same, times)) if *same == last => *times += 1,
                _ => latency.push((last, 1)),
            },
            None => {
                let prompt = request.prompt_logprobs.take();
                self.output
                    .prompt_logprobs
                    .extend(prompt.map(|prompt| *prompt));
                request.first_token = Some(now);
                self.counters
                    .time_to_first_token
                    .observe(now - request.arrived);
                let admitted = request
                    .admitted
                    .expect("invariant: it ran, so it was admitted");
                self.counters.request_prefill_time.observe(now - admitted);
            }
        }
    }

    /// Counts the times since the last tokens: when those were, and of how many requests.
    fn observe_latency(&mut self, now: Instant, latency: Vec<(Instant, u64)>) {
        for (last, times) in latency {
            self.counters
                .inter_token_latency
                .observe_many(now - last, times);
        }
    }

    /// Blocks beyond what the tokens need came with drafts that were not confirmed.
    fn give_back_surplus_blocks(&mut self, index: u32, drafted: bool) {
        if !drafted {
            return;
        }
        let request = self.table.get_mut(index);
        let needed = request
            .tokens
            .len()
            .div_ceil(self.config.block_size as usize);
        if needed < request.table.len() {
            self.blocks.release(&request.table[needed..]);
            request.table.truncate(needed);
            request.note_last();
            for synced in &mut request.synced {
                *synced = (*synced).min(needed as u32);
            }
        }
    }

    /// Makes each block that became full findable; an identical one that is cached already takes its
    /// place.
    fn register_full_blocks(&mut self, index: u32) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let flying = self.is_flying(self.table.get(index));
        let request = self.table.get_mut(index);
        while (request.registered + 1) * block_size <= request.computed {
            let at = request.registered as usize;
            let first = at * block_size as usize;
            let tokens = &request.tokens[first..first + block_size as usize];
            let own = request.table[at];
            if flying {
                // If it is given up, then not before the step in flight has read it.
                self.blocks.share(&[own]);
            }
            let (chain, block) = self.blocks.register(request.chain, own, tokens);
            request.chain = chain;
            if flying && block == own {
                self.blocks.release(&[own]);
            } else if flying {
                self.overlap.leftovers.push(own);
            }
            if block != own {
                request.table[at] = block;
                for synced in &mut request.synced {
                    *synced = (*synced).min(at as u32);
                }
            }
            request.registered += 1;
        }
    }

    /// A chunk was computed: fewer tokens are lacking, so the request moves up.
    fn requeue_active(&mut self, index: u32) {
        let request = self.table.get_mut(index);
        let old = (request.key, request.sequence, index);
        request.key = request.turn_key();
        let new = (request.key, request.sequence, index);
        let (priority, tenant) = (request.priority, request.tenant);
        // In before out, so that the tenant keeps its turn; a chunk is never empty, so the keys differ.
        self.queue.insert(priority, tenant, Kind::Active, new);
        self.queue.remove(priority, tenant, Kind::Active, old);
    }

    /// The prompt is computed: the other choices of the request can share it.
    fn leave_prefill(&mut self, index: u32, prefilling: bool) {
        if prefilling {
            let followers = std::mem::take(&mut self.table.get_mut(index).followers);
            self.release_followers(followers);
        }
    }

    fn start_decoding(&mut self, index: u32) {
        self.dequeue(index, Kind::Active);
        if self.table.get(index).paused {
            self.table.get_mut(index).state = State::Paused;
            self.num_paused += 1;
        } else {
            self.enter_decoding(index);
        }
    }
}
