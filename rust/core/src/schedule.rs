//! What a step computes: blocks for decodes, then prefill tokens by turn.

use std::time::{Duration, Instant};

use crate::engine::{Engine, HOLE};
use crate::queue::{Kind, Place};
use crate::request::{Request, State};

/// A waiting request is looked at again after so many steps even if no block came free.
const RELOOK_STEPS: u64 = 16;

/// Fewest tokens that `target_itl_ms` leaves to prefills, in blocks: progress is never squeezed out.
const MIN_CHUNK_BLOCKS: u32 = 1;

impl Engine {
    /// Decides the step: preempts, admits, and sets `scheduled` of each request in it.
    pub(crate) fn schedule(&mut self) {
        self.close_holes();
        self.provide_decode_blocks();
        let decode_tokens = self.schedule_decodes();
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
    fn provide_decode_blocks(&mut self) {
        let block_size = self.config.block_size;
        for at in 0..self.decoding.len() {
            loop {
                // A victim may be ahead, behind, or this request itself: each leaves a hole.
                let index = self.decoding[at];
                if index == HOLE {
                    break;
                }
                let request = self.table.get_mut(index);
                let room = request.max_len - request.tokens.len() as u32;
                request.drafts.truncate(room.saturating_sub(1) as usize);
                let len = request.tokens.len() + request.drafts.len();
                let needed = (len as u32).div_ceil(block_size) as usize - request.table.len();
                if needed == 0 || self.blocks.allocate(needed, &mut request.table).is_ok() {
                    break;
                }
                if !request.drafts.is_empty() {
                    request.drafts.clear();
                    continue;
                }
                let victim = self.any_victim();
                self.preempt(victim);
            }
        }
    }

    /// Requests with a row that may lose it to one of priority `than`: the less urgent ones (a greater
    /// number), and those whose reader is behind.
    fn victims(&self, than: i32) -> impl Iterator<Item = (u32, &Request)> {
        let running = self.rows.iter().filter(|&&index| index != HOLE);
        let requests = running.map(|&index| (index, self.table.get(index)));
        requests.filter(move |(_, r)| r.priority > than || r.state == State::Paused)
    }

    /// The request to preempt: paused ones first, then lowest priority, then latest arrival.
    fn victim(&self, than: i32) -> Option<u32> {
        self.victims(than)
            .max_by_key(|(_, request)| request.victim_rank())
            .map(|(index, _)| index)
    }

    /// Whom to preempt when a decoding request needs a block: possibly that request itself.
    fn any_victim(&self) -> u32 {
        let running = self.rows.iter().copied().filter(|&index| index != HOLE);
        running
            .max_by_key(|&index| self.table.get(index).victim_rank())
            .expect("invariant: a decoding request has a row")
    }

    /// One token for each decoding request, and its drafts while the budget lasts.
    fn schedule_decodes(&mut self) -> u32 {
        let mut total = self.num_decoding() as u32;
        let spare = self.config.max_num_batched_tokens - total;
        let mut spare_drafts = if self.config.max_draft_tokens == 0 {
            0
        } else {
            spare
        };
        for at in 0..self.decoding.len() {
            let index = self.decoding[at];
            if index != HOLE {
                let request = self.table.get_mut(index);
                if !request.drafts.is_empty() {
                    request.drafts.truncate(spare_drafts as usize);
                    spare_drafts -= request.drafts.len() as u32;
                    total += request.drafts.len() as u32;
                }
                request.scheduled = 1 + request.drafts.len() as u32;
            }
        }
        total
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
                let floor = MIN_CHUNK_BLOCKS * self.config.block_size;
                budget.min(fits.saturating_sub(decode_tokens).max(floor))
            }
        }
    }

    /// Shares `budget` tokens: classes in order, tenants in turn, each tenant's smallest key first.
    fn grant_prefills(&mut self, mut budget: u32) {
        self.grants.clear();
        self.admission_closed = false;
        let mut skips = self.config.max_skips;
        let mut priorities = std::mem::take(&mut self.priorities);
        priorities.clear();
        priorities.extend(self.queue.priorities());
        for &priority in &priorities {
            let mut turns_without_work = 0;
            while budget > 0 {
                let closed = self.admission_closed;
                let Some(class) = self.queue.class(priority) else {
                    break;
                };
                let tenants = class.ring_len(closed);
                if turns_without_work >= tenants {
                    break;
                }
                let tenant = class
                    .front(closed)
                    .expect("invariant: the ring is not empty");
                let allowance = if tenants == 1 {
                    budget
                } else {
                    let fair = self.config.max_num_batched_tokens / tenants as u32;
                    let deficit = class.deficit(tenant);
                    *deficit += u64::from(fair.max(self.config.block_size));
                    (*deficit).min(u64::from(budget)) as u32
                };
                let spent = self.serve(priority, tenant, allowance, &mut skips);
                budget -= spent;
                let Some(class) = self.queue.class(priority) else {
                    break;
                };
                if spent < allowance {
                    // No more work: what it did not use is not saved up.
                    *class.deficit(tenant) = 0;
                } else if tenants > 1 {
                    let deficit = class.deficit(tenant);
                    *deficit = deficit.saturating_sub(u64::from(spent));
                }
                // Once admission closes, only tenants with active requests count.
                let same_ring = closed == self.admission_closed;
                turns_without_work = if spent == 0 && same_ring {
                    turns_without_work + 1
                } else {
                    0
                };
                if tenants == 1 && spent < allowance && same_ring {
                    break;
                }
                if budget > 0 {
                    class.rotate(tenant);
                }
            }
        }
        self.priorities = priorities;
    }

    /// One tenant's turn: up to `allowance` tokens for its requests, by key. Returns the tokens given.
    fn serve(&mut self, priority: i32, tenant: u32, allowance: u32, skips: &mut u32) -> u32 {
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
                self.passed_over(place.2, skips);
                continue;
            }
            spent += self.grant(place.2, allowance - spent);
        }
        spent
    }

    /// Gives a prefilling request up to `tokens` of what it still lacks.
    fn grant(&mut self, index: u32, tokens: u32) -> u32 {
        let request = self.table.get_mut(index);
        let given = tokens.min(request.remaining() - request.scheduled);
        if given > 0 && request.scheduled == 0 {
            self.grants.push(index);
        }
        request.scheduled += given;
        let tenant = request.tenant;
        self.queue.advance(tenant, given);
        given
    }

    /// Moves an admitted request among those that hold a row.
    fn activate(&mut self, place: Place) {
        let request = self.table.get_mut(place.2);
        request.state = State::Prefill;
        // In before out: a tenant whose queues run empty would lose its turn and its deficit.
        self.queue
            .insert(request.priority, request.tenant, Kind::Active, place);
        self.dequeue(place.2, Kind::Waiting);
    }

    /// A request could not be admitted: others may go ahead, a bounded number of them for a bounded
    /// number of steps.
    fn passed_over(&mut self, index: u32, skips: &mut u32) {
        let step = self.step;
        let request = self.table.get_mut(index);
        if request.last_skip_step != step {
            request.last_skip_step = step;
            request.skipped_steps += 1;
        }
        *skips = skips.saturating_sub(1);
        if *skips == 0 || request.skipped_steps > self.config.max_skipped_steps {
            self.admission_closed = true;
        }
    }

    /// Gives a waiting request a row and the blocks of all its tokens, or says what is lacking.
    fn try_admit(&mut self, index: u32) -> bool {
        let priority = self.table.get(index).priority;
        let running = self.num_running();
        let looked_at = self.table.get(index).blocks_needed;
        let urgent = self.victim_possible(priority);
        if self.free_rows.is_empty() && !urgent {
            self.admission_closed = true;
            return false;
        }
        if running > 0
            && !urgent
            && looked_at > self.blocks.num_free()
            && !self.step.is_multiple_of(RELOOK_STEPS)
        {
            return false;
        }
        let mut needed = self.blocks_to_admit(index);
        while self.free_rows.is_empty() || needed > self.blocks.num_free() {
            let Some(victim) = self
                .victim(priority)
                .filter(|_| self.free_rows.is_empty() || self.reclaimable(priority) >= needed)
            else {
                self.table.get_mut(index).blocks_needed = needed;
                self.admission_closed |= self.free_rows.is_empty();
                return false;
            };
            self.preempt(victim);
            needed = self.blocks_to_admit(index);
        }
        self.admit(index);
        true
    }

    /// Whether some running request could make room. Requests of one priority whose readers keep up are
    /// the common case, and then the answer costs nothing.
    fn victim_possible(&mut self, priority: i32) -> bool {
        if self.least_urgent > priority {
            let running = self.rows.iter().filter(|&&index| index != HOLE);
            let priorities = running.map(|&index| self.table.get(index).priority);
            self.least_urgent = priorities.max().unwrap_or(i32::MIN);
        }
        self.least_urgent > priority || self.num_paused > 0
    }

    /// Free blocks if all who may lose theirs to `priority` did, at most.
    fn reclaimable(&self, priority: i32) -> u32 {
        let held = self
            .victims(priority)
            .map(|(_, request)| request.table.len() as u32);
        self.blocks.num_free() + held.sum::<u32>()
    }

    /// Free blocks that admitting a request takes, with the reserve that must stay free beside it.
    fn blocks_to_admit(&self, index: u32) -> u32 {
        let request = self.table.get(index);
        let len = request.tokens.len() as u32;
        let total = len.div_ceil(self.config.block_size);
        let shared = self.shareable(index) as u32;
        let bare = if shared > 0 {
            total - shared
        } else {
            let hit = self
                .blocks
                .lookup(request.root, &request.tokens, self.hit_limit(index));
            total - hit.blocks as u32 + hit.free
        };
        bare + self.reserve(request.preemptions, bare)
    }

    /// One more block for each decoding request, doubled with each preemption the newcomer has gone
    /// through, so that it is not admitted only to be preempted again; never more than those requests can
    /// still grow.
    fn reserve(&self, preemptions: u32, bare: u32) -> u32 {
        let rough = (self.num_decoding() as u32).saturating_mul(1 << preemptions.min(16));
        if bare.saturating_add(rough) <= self.blocks.num_free() {
            return rough;
        }
        let growth = self
            .decoding
            .iter()
            .filter(|&&index| index != HOLE)
            .map(|&index| {
                let request = self.table.get(index);
                request.max_len.div_ceil(self.config.block_size) - request.table.len() as u32
            });
        rough.min(growth.sum())
    }

    /// Most blocks of a request that may come from the cache: its last token is always computed.
    fn hit_limit(&self, index: u32) -> usize {
        let request = self.table.get(index);
        (request.tokens.len() - 1) / self.config.block_size as usize
    }

    /// Without the prefix index, a choice still shares the prompt's blocks with its leader while that
    /// holds them.
    fn shareable(&self, index: u32) -> usize {
        let request = self.table.get(index);
        if self.config.enable_prefix_caching || request.num_output() > 0 {
            return 0;
        }
        let leader = request.leader.and_then(|id| self.table.find(id));
        leader.map_or(0, |leader| {
            let leader = self.table.get(leader);
            let full = (leader.computed / self.config.block_size) as usize;
            full.min(leader.table.len()).min(self.hit_limit(index))
        })
    }

    fn admit(&mut self, index: u32) {
        let block_size = self.config.block_size;
        let shared = self.shareable(index);
        let limit = self.hit_limit(index);
        let row = self.free_rows.pop().expect("invariant: a row is free");
        self.rows[row as usize] = index;
        if shared > 0 {
            let leader = self
                .table
                .get(index)
                .leader
                .and_then(|id| self.table.find(id));
            let leader = leader.expect("invariant: shareable blocks have an owner");
            let blocks = self.table.get(leader).table[..shared].to_vec();
            self.blocks.share(&blocks);
            self.table.get_mut(index).table.extend_from_slice(&blocks);
        }
        let request = self.table.get_mut(index);
        if !self.blocks.is_current(request.root) {
            // The cache was reset since this request last held a root.
            request.root = self.blocks.root(&request.extra_keys);
        }
        let mut hit = shared;
        request.chain = request.root;
        if shared == 0 {
            let (chain, found) =
                self.blocks
                    .acquire(request.root, &request.tokens, limit, &mut request.table);
            request.chain = chain;
            hit = found;
        }
        let total = (request.tokens.len() as u32).div_ceil(block_size) as usize;
        let fresh = total - request.table.len();
        self.blocks
            .allocate(fresh, &mut request.table)
            .expect("invariant: the free blocks were counted before");
        request.row = row;
        request.registered = hit as u32;
        request.computed = hit as u32 * block_size;
        request.scheduled = 0;
        request.synced = [0; 2];
        self.least_urgent = self.least_urgent.max(request.priority);
        if request.admitted.is_none() {
            let now = Instant::now();
            request.admitted = Some(now);
            request.cached_tokens = Some(request.computed);
            self.counters.prompt_tokens += u64::from(request.prompt_len);
            self.counters
                .request_queue_time
                .observe(now - request.arrived);
        }
    }
}
