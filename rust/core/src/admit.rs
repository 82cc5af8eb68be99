//! Who gets a row and blocks, and who loses them for it.

use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::block::BlockId;
use crate::engine::{Engine, HOLE};
use crate::queue::Kind;
use crate::request::{Request, RequestId};

/// A waiting request is looked at again after so many steps even if too few blocks seem to be free: what
/// it needs shrinks when others compute its prefix.
const RELOOK_STEPS: u64 = 16;

impl Engine {
    /// Requests with a row that may lose it to one of priority `than`: the less urgent ones (a greater
    /// number), and those whose reader is behind.
    fn victims(&self, than: i32) -> impl Iterator<Item = (u32, &Request)> {
        let running = self.rows.iter().filter(|&&index| index != HOLE);
        let requests = running.map(|&index| (index, self.table.get(index)));
        requests.filter(move |(_, request)| request.yields_to(than))
    }

    /// The request to preempt: paused ones first, then lowest priority, then latest arrival.
    fn victim(&self, than: i32) -> Option<u32> {
        self.victims(than)
            .max_by_key(|(_, request)| request.victim_rank())
            .map(|(index, _)| index)
    }

    /// Whom to preempt when a decoding request needs a block: possibly that request itself.
    pub(crate) fn any_victim(&self) -> u32 {
        let running = self.rows.iter().copied().filter(|&index| index != HOLE);
        running
            .max_by_key(|&index| self.table.get(index).victim_rank())
            .expect("invariant: a decoding request has a row")
    }

    /// Decodes use the whole budget: a more urgent request that waits takes the place of one of them.
    pub(crate) fn make_way(&mut self) {
        let Some(priority) = self.queue.next_priority(None, false) else {
            return;
        };
        let class = self.queue.class(priority);
        let class = class.expect("invariant: listed classes exist");
        let (_, tenant) = class
            .next_tenant(false, None)
            .expect("invariant: the ring is not empty");
        if let Some(place) = class.next(tenant, Kind::Waiting, None)
            && self.victim_possible(priority)
            && self.fits_without_victims(place.2)
            && let Some(victim) = self.victim(priority)
        {
            if self.overlap.active {
                self.overlap.victims_wait = true;
                return;
            }
            self.preempt(victim);
        }
    }

    /// A request of this class that was passed over too often comes before all others, whoever's turn it
    /// is, and nothing is admitted behind it if it still does not fit.
    pub(crate) fn admit_overdue(&mut self, priority: i32) {
        let Some(&id) = self.overdue.get(&priority) else {
            return;
        };
        if self.admission_closed {
            return;
        }
        let index = self.table.find(id);
        let index = index.expect("invariant: what is overdue waits");
        let request = self.table.get(index);
        let place = (request.key, request.sequence, index);
        if self.try_admit(index) {
            self.activate(place);
        } else {
            self.admission_closed = true;
        }
    }

    /// A request is admitted or ends.
    pub(crate) fn no_more_overdue(&mut self, priority: i32, id: RequestId) {
        if self.overdue.get(&priority) == Some(&id) {
            self.overdue.remove(&priority);
        }
    }

    /// A request could not be admitted for want of blocks: others may go ahead, a bounded number of them
    /// for a bounded number of steps.
    fn passed_over(&mut self, index: u32) {
        let request = self.table.get_mut(index);
        if request.last_skip_step == self.step {
            return;
        }
        request.last_skip_step = self.step;
        request.skipped_steps += 1;
        let limit = self.config.max_skipped_steps;
        if request.skipped_steps >= limit.max(1) {
            // One at a time: those that were passed over together still come by turns.
            self.overdue.entry(request.priority).or_insert(request.id);
        }
        self.skips = self.skips.saturating_sub(1);
        self.admission_closed |= self.skips == 0 || request.skipped_steps > limit;
    }

    /// Gives a waiting request a row and the blocks of all its tokens, if they are there or can be taken
    /// from others.
    pub(crate) fn try_admit(&mut self, index: u32) -> bool {
        let priority = self.table.get(index).priority;
        let urgent = self.victim_possible(priority);
        if self.free_rows.is_empty() && !urgent {
            self.admission_closed = true;
            return false;
        }
        if !self.seems_too_big(index, urgent) {
            let needed = self.blocks_to_admit(index);
            let fits = !self.free_rows.is_empty() && needed <= self.blocks.num_free();
            if fits || (urgent && self.fits_without_victims(index)) {
                if !fits && self.overlap.active {
                    self.overlap.victims_wait = true;
                    self.admission_closed = true;
                    return false;
                }
                if !fits {
                    self.take_from_victims(index);
                }
                self.admit(index);
                self.no_more_overdue(priority, self.table.get(index).id);
                return true;
            }
        }
        if self.free_rows.is_empty() {
            self.admission_closed = true;
        } else {
            self.passed_over(index);
        }
        false
    }

    /// Preempts until a request has what it needs.
    fn take_from_victims(&mut self, index: u32) {
        let priority = self.table.get(index).priority;
        while self.free_rows.is_empty() || self.blocks_to_admit(index) > self.blocks.num_free() {
            let victim = self.victim(priority);
            self.preempt(victim.expect("invariant: it fits without the victims"));
        }
    }

    /// A cheap look that spares most of the thorough ones: whether what a request needed when last looked
    /// at is still more than there can be.
    fn seems_too_big(&mut self, index: u32, urgent: bool) -> bool {
        let request = self.table.get(index);
        let (bare, preemptions) = (request.blocks_needed, request.preemptions);
        let overdue = request.skipped_steps >= self.config.max_skipped_steps.max(1);
        if self.num_running() == 0 || overdue || self.step.is_multiple_of(RELOOK_STEPS) {
            return false;
        }
        let free = self.blocks.num_free();
        if urgent {
            let victims = self.victims(request.priority);
            let held: usize = victims.map(|(_, victim)| victim.table.len()).sum();
            return bare > free + held as u32;
        }
        bare > free || bare + self.reserve(preemptions, bare) > free
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

    /// Whether a request would fit if all who may lose their row to it did: what [`Self::blocks_to_admit`]
    /// would then say, against what would then be free.
    fn fits_without_victims(&self, index: u32) -> bool {
        let request = self.table.get(index);
        let mut lost: FxHashMap<BlockId, u32> = FxHashMap::default();
        let mut rows = self.free_rows.len();
        for (_, victim) in self.victims(request.priority) {
            rows += 1;
            for &block in &victim.table {
                *lost.entry(block).or_default() += 1;
            }
        }
        // A block that several hold comes free only if all of those are victims.
        let stays = |block: BlockId| {
            self.blocks.references(block) > lost.get(&block).copied().unwrap_or_default()
        };
        let freed = lost.keys().filter(|&&block| !stays(block)).count() as u32;
        let total = (request.tokens.len() as u32).div_ceil(self.config.block_size);
        let leader = self.sharing_leader(index);
        let hits = match leader {
            Some(leader) if leader.yields_to(request.priority) => 0,
            Some(leader) => self.num_shareable(index, leader),
            None => {
                let limit = self.hit_limit(index);
                let hits = self.blocks.cached(request.root, &request.tokens, limit);
                hits.filter(|&block| stays(block)).count()
            }
        };
        let bare = total - hits as u32;
        let survivors = self.decoding.iter().filter(|&&index| index != HOLE);
        let survivors = survivors.map(|&index| self.table.get(index));
        let survivors = survivors.filter(|other| !other.yields_to(request.priority));
        let (count, growth) = survivors.fold((0u32, 0), |(count, growth), other| {
            (count + 1, growth + self.growth_of(other))
        });
        let reserve = rough_reserve(count, request.preemptions).min(growth);
        rows > 0 && bare.saturating_add(reserve) <= self.blocks.num_free() + freed
    }

    /// Free blocks that admitting a request takes, with the reserve that must stay free beside it.
    fn blocks_to_admit(&mut self, index: u32) -> u32 {
        let request = self.table.get(index);
        let len = request.tokens.len() as u32;
        let total = len.div_ceil(self.config.block_size);
        let bare = match self.sharing_leader(index) {
            Some(leader) => total - self.num_shareable(index, leader) as u32,
            None => {
                let limit = self.hit_limit(index);
                let (root, tokens) = (request.root, &request.tokens);
                self.matched.clear();
                self.matched.extend(self.blocks.cached(root, tokens, limit));
                let free = |&&block: &&BlockId| self.blocks.references(block) == 0;
                let taken = self.matched.iter().filter(free).count();
                total - self.matched.len() as u32 + taken as u32
            }
        };
        let preemptions = request.preemptions;
        self.table.get_mut(index).blocks_needed = bare;
        bare + self.reserve(preemptions, bare)
    }

    /// One more block for each decoding request, doubled with each preemption the newcomer has gone
    /// through, so that it is not admitted only to be preempted again; never more than those requests can
    /// still grow.
    fn reserve(&mut self, preemptions: u32, bare: u32) -> u32 {
        let rough = rough_reserve(self.num_decoding() as u32, preemptions);
        if bare.saturating_add(rough) <= self.blocks.num_free() {
            return rough;
        }
        let growth = self.growth.unwrap_or_else(|| {
            let decoding = self.decoding.iter().filter(|&&index| index != HOLE);
            decoding
                .map(|&index| self.growth_of(self.table.get(index)))
                .sum()
        });
        self.growth = Some(growth);
        rough.min(growth)
    }

    /// Blocks that a request may still come to need.
    fn growth_of(&self, request: &Request) -> u32 {
        request.max_len.div_ceil(self.config.block_size) - request.table.len() as u32
    }

    /// Most blocks of a request that may come from the cache: its last token is always computed.
    fn hit_limit(&self, index: u32) -> usize {
        let request = self.table.get(index);
        (request.tokens.len() - 1).min(request.reusable_tokens()) / self.config.block_size as usize
    }

    /// Without the prefix index, a choice still shares the prompt's blocks with its leader while that
    /// holds them.
    fn sharing_leader(&self, index: u32) -> Option<&Request> {
        let request = self.table.get(index);
        if self.config.enable_prefix_caching || request.num_output() > 0 {
            return None;
        }
        let leader = self.table.find(request.leader)?;
        Some(self.table.get(leader))
    }

    fn num_shareable(&self, index: u32, leader: &Request) -> usize {
        let full = (leader.computed / self.config.block_size) as usize;
        full.min(leader.table.len()).min(self.hit_limit(index))
    }

    fn admit(&mut self, index: u32) {
        let block_size = self.config.block_size;
        let row = self.free_rows.pop().expect("invariant: a row is free");
        self.rows[row as usize] = index;
        let leader = self.sharing_leader(index);
        let blocks =
            leader.map(|leader| leader.table[..self.num_shareable(index, leader)].to_vec());
        let request = self.table.get_mut(index);
        if !self.blocks.is_current(request.root) {
            // The cache was reset since this request last held a root.
            request.root = self.blocks.root(&request.extra_keys);
        }
        request.chain = request.root;
        if let Some(blocks) = blocks {
            self.blocks.share(&blocks);
            request.table.extend_from_slice(&blocks);
        } else {
            // What `blocks_to_admit` found last: nothing was allocated since.
            let (root, len) = (request.root, request.tokens.len());
            let table = &mut request.table;
            request.chain = self.blocks.acquire_found(root, &self.matched, len, table);
        }
        let hit = request.table.len() as u32;
        let total = (request.tokens.len() as u32).div_ceil(block_size);
        self.blocks
            .allocate((total - hit) as usize, &mut request.table)
            .expect("invariant: the free blocks were counted before");
        request.row = row;
        request.registered = hit;
        request.computed = hit * block_size;
        request.scheduled = 0;
        request.synced = [0; 2];
        request.skipped_steps = 0;
        self.least_urgent = self.least_urgent.max(request.priority);
        if request.admitted.is_none() {
            let now = Instant::now();
            request.admitted = Some(now);
            request.cached_tokens = request.computed;
            self.counters.prompt_tokens += u64::from(request.prompt_len);
            self.counters
                .request_queue_time
                .observe(now - request.arrived);
        }
    }
}

fn rough_reserve(decoding: u32, preemptions: u32) -> u32 {
    decoding.saturating_mul(1 << preemptions.min(16))
}
