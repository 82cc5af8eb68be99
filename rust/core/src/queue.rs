//! The order in which prefills get tokens.
//!
//! Priority classes first; within a class tenants take turns (deficit round robin, Shreedhar and
//! Varghese, SIGCOMM 1995); within a tenant the smallest key goes first. A key is the tenant's clock
//! (prefill tokens it had been given) at the request's arrival plus the tokens of its prompt that the
//! request still lacks.
//! Among requests that came together this is shortest remaining first; and nothing that comes once the
//! tenant was given R more tokens goes before a request that lacked R, so nothing starves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use rustc_hash::FxHashMap;

/// Position in a queue: key, then order of arrival.
pub(crate) type Place = (i64, u64, u32);

/// Which of a tenant's two queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Holds a row and blocks already.
    Active,
    /// Waits for admission.
    Waiting,
}

#[derive(Default)]
struct Turn {
    active: BTreeSet<Place>,
    waiting: BTreeSet<Place>,
    /// Tokens left of its turn; 0 outside of one.
    deficit: u32,
    /// Its key in the ring.
    position: u64,
}

/// One priority class: its tenants with work, in turn.
#[derive(Default)]
pub(crate) struct Class {
    turns: FxHashMap<u32, Turn>,
    /// Tenants by turn; a map, so that any of them leaves in logarithmic time.
    ring: BTreeMap<u64, u32>,
    /// Those of them that have active requests: all there is to serve when nothing is admitted.
    active_ring: BTreeMap<u64, u32>,
    next_position: u64,
}

impl Class {
    fn ring(&self, active_only: bool) -> &BTreeMap<u64, u32> {
        if active_only {
            &self.active_ring
        } else {
            &self.ring
        }
    }

    /// Tenants with work, or with active requests only.
    pub fn ring_len(&self, active_only: bool) -> usize {
        self.ring(active_only).len()
    }

    /// The first of them whose turn comes after a position in the ring, and its position.
    pub fn next_tenant(&self, active_only: bool, after: Option<u64>) -> Option<(u64, u32)> {
        let range = (after.map_or(Unbounded, Excluded), Unbounded);
        let next = self.ring(active_only).range(range).next();
        next.map(|(&position, &tenant)| (position, tenant))
    }

    fn rotate(&mut self, tenant: u32) {
        let position = self.turn(tenant).position;
        self.ring.remove(&position);
        let last = self.enter(tenant);
        self.turn(tenant).position = last;
        if self.active_ring.remove(&position).is_some() {
            self.active_ring.insert(last, tenant);
        }
    }

    fn enter(&mut self, tenant: u32) -> u64 {
        let position = self.next_position;
        self.next_position += 1;
        self.ring.insert(position, tenant);
        position
    }

    fn turn(&mut self, tenant: u32) -> &mut Turn {
        self.turns
            .get_mut(&tenant)
            .expect("invariant: a tenant in the ring has a turn")
    }

    /// The first place after `after` in a tenant's queue.
    pub fn next(&self, tenant: u32, kind: Kind, after: Option<Place>) -> Option<Place> {
        let turn = self.turns.get(&tenant)?;
        let set = match kind {
            Kind::Active => &turn.active,
            Kind::Waiting => &turn.waiting,
        };
        match after {
            None => set.first().copied(),
            Some(place) => set.range((Excluded(place), Unbounded)).next().copied(),
        }
    }

    /// Tokens that a tenant's turn still allows. A turn begins with `quantum`, and goes on in the next
    /// step if the step's budget ends before it.
    pub fn turn_allowance(&mut self, tenant: u32, quantum: u32) -> u32 {
        let turn = self.turn(tenant);
        if turn.deficit == 0 {
            turn.deficit = quantum;
        }
        turn.deficit
    }

    /// A tenant used `tokens` of its turn, which ends when it has used all or has no more work: what it
    /// leaves is not saved up.
    pub fn spend(&mut self, tenant: u32, tokens: u32, out_of_work: bool) {
        let turn = self.turn(tenant);
        turn.deficit = turn.deficit.saturating_sub(tokens);
        if out_of_work {
            turn.deficit = 0;
        }
        if turn.deficit == 0 {
            self.rotate(tenant);
        }
    }
}

#[derive(Default)]
struct Tenant {
    name: Arc<str>,
    clock: u64,
    requests: u32,
}

/// All requests that want prefill tokens, and the tenants they belong to.
#[derive(Default)]
pub(crate) struct PrefillQueue {
    classes: BTreeMap<i32, Class>,
    /// Priorities of the classes that have active requests.
    active_classes: BTreeSet<i32>,
    tenants: Vec<Tenant>,
    by_name: FxHashMap<Arc<str>, u32>,
    free: Vec<u32>,
    waiting: usize,
    active: usize,
}

impl PrefillQueue {
    pub fn num_waiting(&self) -> usize {
        self.waiting
    }

    pub fn num_active(&self) -> usize {
        self.active
    }

    /// The most urgent priority after `after` that has work, or active requests.
    pub fn next_priority(&self, after: Option<i32>, active_only: bool) -> Option<i32> {
        let range = (after.map_or(Unbounded, Excluded), Unbounded);
        if active_only {
            self.active_classes.range(range).next().copied()
        } else {
            self.classes.range(range).next().map(|(&key, _)| key)
        }
    }

    pub fn class(&mut self, priority: i32) -> Option<&mut Class> {
        self.classes.get_mut(&priority)
    }

    /// Counts a live request of a tenant; returns the tenant's number.
    pub fn join(&mut self, name: &Arc<str>) -> u32 {
        let tenant = match self.by_name.get(name) {
            Some(&tenant) => tenant,
            None => {
                let new = Tenant {
                    name: name.clone(),
                    clock: 0,
                    requests: 0,
                };
                let tenant = match self.free.pop() {
                    Some(tenant) => {
                        self.tenants[tenant as usize] = new;
                        tenant
                    }
                    None => {
                        self.tenants.push(new);
                        self.tenants.len() as u32 - 1
                    }
                };
                self.by_name.insert(name.clone(), tenant);
                tenant
            }
        };
        self.tenants[tenant as usize].requests += 1;
        tenant
    }

    /// A request of the tenant ended; a tenant without requests is forgotten.
    pub fn leave(&mut self, tenant: u32) {
        let entry = &mut self.tenants[tenant as usize];
        entry.requests -= 1;
        if entry.requests == 0 {
            let name = std::mem::take(&mut entry.name);
            self.by_name.remove(&name);
            self.free.push(tenant);
        }
    }

    /// Prefill tokens given to a tenant so far.
    pub fn clock(&self, tenant: u32) -> u64 {
        self.tenants[tenant as usize].clock
    }

    pub fn advance(&mut self, tenant: u32, tokens: u32) {
        self.tenants[tenant as usize].clock += u64::from(tokens);
    }

    pub fn insert(&mut self, priority: i32, tenant: u32, kind: Kind, place: Place) {
        let class = self.classes.entry(priority).or_default();
        if !class.turns.contains_key(&tenant) {
            let position = class.enter(tenant);
            class.turns.insert(
                tenant,
                Turn {
                    position,
                    ..Turn::default()
                },
            );
        }
        let turn = class.turn(tenant);
        let (set, count) = match kind {
            Kind::Active => (&mut turn.active, &mut self.active),
            Kind::Waiting => (&mut turn.waiting, &mut self.waiting),
        };
        let new = set.insert(place);
        debug_assert!(new, "a request is queued once");
        *count += 1;
        if kind == Kind::Active {
            let position = turn.position;
            class.active_ring.insert(position, tenant);
            self.active_classes.insert(priority);
        }
    }

    pub fn remove(&mut self, priority: i32, tenant: u32, kind: Kind, place: Place) {
        let class = self
            .classes
            .get_mut(&priority)
            .expect("invariant: queued in this class");
        let turn = class
            .turns
            .get_mut(&tenant)
            .expect("invariant: queued under this tenant");
        let (set, count) = match kind {
            Kind::Active => (&mut turn.active, &mut self.active),
            Kind::Waiting => (&mut turn.waiting, &mut self.waiting),
        };
        let present = set.remove(&place);
        debug_assert!(present, "a request is removed from the queue it is in");
        *count -= 1;
        let position = turn.position;
        if turn.active.is_empty() {
            class.active_ring.remove(&position);
            if class.active_ring.is_empty() {
                self.active_classes.remove(&priority);
            }
        }
        if turn.active.is_empty() && turn.waiting.is_empty() {
            class.turns.remove(&tenant);
            class.ring.remove(&position);
            if class.ring.is_empty() {
                self.classes.remove(&priority);
            }
        }
    }

    /// Every queued request (its table index) with the queue it is in.
    pub fn iter(&self) -> impl Iterator<Item = (Kind, u32)> + '_ {
        self.classes
            .values()
            .flat_map(|class| class.turns.values())
            .flat_map(|turn| {
                let active = turn.active.iter().map(|place| (Kind::Active, place.2));
                active.chain(turn.waiting.iter().map(|place| (Kind::Waiting, place.2)))
            })
    }

    #[cfg(test)]
    fn num_tenants(&self) -> usize {
        self.by_name.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_after_the_length_of_a_request_was_given_does_not_overtake_it() {
        let mut queue = PrefillQueue::default();
        let tenant = queue.join(&"".into());
        queue.insert(0, tenant, Kind::Waiting, (1000, 0, 0));
        let mut overtaken = 0;
        for sequence in 1.. {
            let key = queue.clock(tenant) as i64 + 100;
            queue.insert(0, tenant, Kind::Waiting, (key, sequence, sequence as u32));
            let class = queue.class(0).expect("has work");
            let first = class.next(tenant, Kind::Waiting, None).expect("has work");
            queue.remove(0, tenant, Kind::Waiting, first);
            if first.2 == 0 {
                break;
            }
            overtaken += 100;
            queue.advance(tenant, 100);
        }
        assert!(overtaken <= 1000, "{overtaken}");
    }

    #[test]
    fn tenants_without_requests_leave_nothing_behind() {
        let mut queue = PrefillQueue::default();
        for round in 0..100 {
            let name: Arc<str> = format!("tenant {round}").into();
            let tenant = queue.join(&name);
            assert_eq!(tenant, 0);
            queue.insert(3, tenant, Kind::Active, (1, 1, 7));
            assert_eq!(queue.iter().collect::<Vec<_>>(), [(Kind::Active, 7)]);
            queue.remove(3, tenant, Kind::Active, (1, 1, 7));
            queue.leave(tenant);
        }
        assert_eq!(
            (
                queue.num_tenants(),
                queue.classes.len(),
                queue.tenants.len()
            ),
            (0, 0, 1)
        );
    }
}
