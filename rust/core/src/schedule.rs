//! What a step computes: blocks for decodes, then prefill tokens by turn.

use std::time::Duration;

use crate::engine::{Engine, HOLE};
use crate::queue::{Kind, Place};
use crate::request::State;

/// Fewest tokens that `target_itl_ms` and drafts leave to prefills, in blocks: progress is never squeezed
/// out.
const MIN_CHUNK_BLOCKS: u32 = 1;

impl Engine {
    /// Decides the step: preempts, admits, and sets `scheduled` of each request in it.
    pub(crate) fn schedule(&mut self) {
        self.growth = None;
        self.close_holes();
        self.schedule_decodes();
        self.give_pending_room();
        self.refund = 0;
        let decode_tokens = self.decode_tokens();
        let budget = self.prefill_budget(decode_tokens);
        self.grant_prefills(budget);
        self.close_holes();
    }

    /// Closes the gaps that ended and preempted requests left in the list of decoding ones.
    fn close_holes(&mut self) {
        if self.decoding_holes == 0 {
            return;
        }
        self.decoding.retain(|&index| index != HOLE);
        for (at, &index) in self.decoding.iter().enumerate() {
            self.table.get_mut(index).decode_at = at as u32;
        }
        self.decoding_holes = 0;
    }

    /// Gives each decoding request room for its next token (and drafts), preempting where none is left.
    fn schedule_decodes(&mut self) {
        if self.config.max_draft_tokens > 0 {
            self.draft();
            let mut spare_drafts = self.draft_budget();
            for at in 0..self.decoding.len() {
                // A victim may be ahead, behind, or this request itself: each leaves a hole.
                while self.decoding[at] != HOLE
                    && !self.give_room(self.decoding[at], &mut spare_drafts)
                {}
            }
            return;
        }
        // Without drafts a request needs room once a block: only those that have filled theirs are looked at.
        let mut growing = std::mem::take(&mut self.growing);
        for index in growing.drain(..) {
            while self
                .table
                .find_index(index)
                .is_some_and(|r| r.state == State::Decode)
                && !self.give_room(index, &mut 0)
            {}
        }
        self.growing = growing;
    }

    /// Gives a decoding request blocks for its next token and up to `spare_drafts` drafts. False if there are
    /// none: then it has lost its drafts or somebody has been preempted, maybe it.
    fn give_room(&mut self, index: u32, spare_drafts: &mut u32) -> bool {
        let block_size = self.config.block_size as usize;
        let request = self.table.get_mut(index);
        let room = request.max_len - request.tokens.len() as u32;
        let most = (*spare_drafts).min(room.saturating_sub(1));
        if request.drafts.len() > most as usize {
            request.drafts = request.drafts[..most as usize].into();
        }
        let drafts = request.drafts.len();
        let (len, held) = (request.tokens.len() + drafts, request.table.len());
        let lacking = len.div_ceil(block_size).saturating_sub(held);
        if lacking == 0 || self.blocks.allocate(lacking, &mut request.table).is_ok() {
            if lacking > 0 {
                request.note_last();
            }
            request.scheduled = 1 + drafts as u32;
            *spare_drafts -= drafts as u32;
            return true;
        }
        if drafts > 0 {
            request.drafts = Box::default();
        } else {
            let victim = self.any_victim();
            self.preempt(victim);
        }
        false
    }

    /// Draft tokens that the step may hold: what decodes leave, less a chunk for prefills if there are any.
    fn draft_budget(&self) -> u32 {
        if self.config.max_draft_tokens == 0 {
            return 0;
        }
        let spare = self.config.max_num_batched_tokens - self.num_decoding() as u32;
        if self.queue.num_active() + self.queue.num_waiting() == 0 {
            return spare;
        }
        spare.saturating_sub(MIN_CHUNK_BLOCKS * self.config.block_size)
    }

    /// Tokens of the decoding requests in this step.
    fn decode_tokens(&self) -> u32 {
        if self.config.max_draft_tokens == 0 {
            return self.num_decodes();
        }
        let indices = self.decoding.iter().filter(|&&index| index != HOLE);
        indices.map(|&index| self.table.get(index).scheduled).sum()
    }

    /// Tokens that prefills may have in this step.
    fn prefill_budget(&self, decode_tokens: u32) -> u32 {
        let budget = self.config.max_num_batched_tokens - decode_tokens;
        let Some(target) = self.config.target_itl_ms.filter(|_| decode_tokens > 0) else {
            return budget;
        };
        let target = Duration::from_secs_f64(target / 1e3);
        match self.cost.tokens_within(target) {
            None => budget,
            Some(fits) => {
                // Where decodes alone take longer than the target, prompts still get as much as they.
                let floor = decode_tokens.max(MIN_CHUNK_BLOCKS * self.config.block_size);
                budget.min(fits.saturating_sub(decode_tokens).max(floor))
            }
        }
    }

    /// Shares `budget` tokens: classes in order, tenants in turn, each tenant's smallest key first.
    fn grant_prefills(&mut self, mut budget: u32) {
        self.grants.clear();
        self.admission_closed = false;
        self.skips = self.config.max_skips;
        if budget == 0 {
            self.make_way();
            budget = std::mem::take(&mut self.refund);
        }
        let mut after = None;
        while budget > 0
            && let Some(priority) = self.queue.next_priority(after, self.admission_closed)
        {
            self.admit_overdue(priority);
            budget = self.share(priority, budget);
            after = Some(priority);
        }
    }

    /// Shares `budget` tokens between the tenants of one class. Returns what is left.
    fn share(&mut self, priority: i32, mut budget: u32) -> u32 {
        let total = budget;
        // Those that got nothing are passed by, and keep their place in the ring for the next step.
        let mut passed = None;
        while budget > 0 {
            let closed = self.admission_closed;
            let Some(class) = self.queue.class(priority) else {
                break;
            };
            let Some((position, tenant)) = class.next_tenant(closed, passed) else {
                break;
            };
            let tenants = class.ring_len(closed) as u32;
            let quantum = (total / tenants).max(self.config.block_size);
            let allowance = match tenants {
                1 => budget,
                _ => class.turn_allowance(tenant, quantum).min(budget),
            };
            let spent = self.serve(priority, tenant, allowance);
            budget = budget - spent + std::mem::take(&mut self.refund);
            if spent == 0 {
                passed = Some(position);
            } else if let Some(class) = self.queue.class(priority) {
                // Alone for want of room for others, it has had a turn like them.
                class.spend(tenant, spent, tenants == 1 || spent < allowance);
            }
        }
        budget
    }

    /// One tenant's turn: up to `allowance` tokens for its requests, by key. Returns the tokens given.
    fn serve(&mut self, priority: i32, tenant: u32, allowance: u32) -> u32 {
        let mut spent = 0;
        let (mut after_active, mut after_waiting) = (None, None);
        while spent < allowance {
            let class = self
                .queue
                .class(priority)
                .expect("invariant: the class has this tenant");
            let active = class.next(tenant, Kind::Active, after_active);
            let waiting = if self.admission_closed {
                None
            } else {
                class.next(tenant, Kind::Waiting, after_waiting)
            };
            let (place, is_active) = match (active, waiting) {
                (None, None) => break,
                (Some(a), None) => (a, true),
                (None, Some(w)) => (w, false),
                (Some(a), Some(w)) => (a.min(w), a < w),
            };
            if is_active {
                after_active = Some(place);
            } else if self.try_admit(place.2) {
                self.activate(place);
            } else {
                after_waiting = Some(place);
                continue;
            }
            spent += self.grant(place.2, allowance - spent);
        }
        spent
    }

    /// Gives a prefilling request up to `tokens` of what it still lacks.
    fn grant(&mut self, index: u32, tokens: u32) -> u32 {
        let flying = self.flight(self.table.get(index)).tokens;
        let request = self.table.get_mut(index);
        if flying > 0 && request.prompt_logprobs.is_some() {
            // Which of them are known, and so which rows are asked for, is told by the commit.
            return 0;
        }
        let given = tokens.min(request.remaining() - request.scheduled - flying);
        if given > 0 && request.scheduled == 0 {
            self.grants.push(index);
        }
        request.scheduled += given;
        let tenant = request.tenant;
        self.queue.advance(tenant, given);
        given
    }

    /// Moves an admitted request among those that hold a row.
    pub(crate) fn activate(&mut self, place: Place) {
        let request = self.table.get_mut(place.2);
        request.state = State::Prefill;
        // In before out: a tenant whose queues run empty would lose its turn and its deficit.
        self.queue
            .insert(request.priority, request.tenant, Kind::Active, place);
        self.dequeue(place.2, Kind::Waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::EngineConfig;
    use crate::arrays::header;
    use crate::cost::StepCost;
    use crate::request::NewRequest;
    use crate::sim::Simulation;

    /// What is known of steps: one millisecond, and so many microseconds a token.
    fn cost(per_token: u64) -> StepCost {
        let mut cost = StepCost::default();
        for step in 0..200u32 {
            let tokens = 1 + step % 64;
            let elapsed = Duration::from_micros(1000 + per_token * u64::from(tokens));
            cost.observe(tokens, elapsed);
        }
        cost
    }

    fn simulation(target_itl_ms: f64) -> Simulation {
        let config = EngineConfig {
            block_size: 4,
            num_blocks: 1000,
            max_num_seqs: 8,
            max_num_batched_tokens: 256,
            max_model_len: 4000,
            target_itl_ms: Some(target_itl_ms),
            ..EngineConfig::default()
        };
        Simulation::new(config, vec![], 97).expect("a valid configuration")
    }

    fn submit(simulation: &mut Simulation, len: u32) {
        simulation.submit(NewRequest {
            prompt: (0..len).collect(),
            n: 1,
            ..NewRequest::default()
        });
    }

    #[test]
    fn prefill_chunks_shrink_to_the_target_and_no_further_than_a_block() {
        let mut simulation = simulation(5.0);
        simulation.engine.cost = cost(20);
        // Nobody waits for a token yet: the whole budget.
        submit(&mut simulation, 256);
        assert_eq!(simulation.step(), Ok(256));
        submit(&mut simulation, 3000);
        // (5 - 1) ms at 20 and 40 us a token; at 2 ms a token not even a block fits.
        for (per_token, expected) in [
            (20, 195..=205),
            (40, 97..=103),
            (2000, 5..=5),
            (1, 256..=256),
        ] {
            simulation.engine.cost = cost(per_token);
            let tokens = simulation.step().expect("step");
            assert!(expected.contains(&tokens), "{tokens} at {per_token} us");
            let decodes = simulation.arrays.view().header[header::NUM_DECODES].get();
            assert_eq!(decodes, 1);
        }
    }

    #[test]
    fn prompts_get_as_much_as_the_decodes_that_are_too_slow_by_themselves() {
        let mut simulation = simulation(5.0);
        for _ in 0..7 {
            submit(&mut simulation, 4);
        }
        simulation.step().expect("step");
        submit(&mut simulation, 3000);
        simulation.engine.cost = cost(2000);
        assert_eq!(simulation.step(), Ok(7 + 7));
        let decodes = simulation.arrays.view().header[header::NUM_DECODES].get();
        assert_eq!(decodes, 7);
    }

    #[test]
    fn without_anything_known_the_budget_is_the_limit() {
        let mut simulation = simulation(1e-6);
        submit(&mut simulation, 4);
        simulation.step().expect("step");
        submit(&mut simulation, 3000);
        simulation.engine.cost = StepCost::default();
        assert_eq!(simulation.step(), Ok(256));
    }
}
