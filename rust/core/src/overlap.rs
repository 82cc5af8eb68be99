//! Planning a step while the one before it is in flight.
//!
//! What that step samples is not known yet. A request that gets a token from it is planned with this token
//! pending: `source` says which sample it will be, and the device puts it in. Everything else about the step
//! follows from the number of tokens alone.
//!
//! A request that turns out to have ended, or is cancelled, while a step has it leaves for its reader at once,
//! but keeps its row and blocks until that step is committed ([`State::Gone`]); what the step says of it is
//! dropped. Nobody is preempted while a step is in flight: where somebody would have to be, nothing is planned,
//! and the plan after the commit sees to it.

use crate::block::BlockId;
use crate::edits::LogitEdits;
use crate::engine::{Engine, Planned, Slot};
use crate::error::StepError;
use crate::request::{NO_ROW, Request, State};

/// What the steps in flight have of the request of a row.
#[derive(Clone, Copy, Default)]
pub(crate) struct Flight {
    /// Bit i: the step of slot i has it.
    slots: u8,
    /// Tokens they compute for it.
    pub tokens: u32,
}

/// A request planned with its next token pending.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub index: u32,
    /// Which sample of the step in flight the token is.
    pub sample: u32,
}

/// What a plan knows of the step in flight, and steps in flight of their requests.
#[derive(Default)]
pub(crate) struct Overlap {
    /// The plan under way has a step in flight before it.
    pub active: bool,
    /// By row.
    pub flights: Vec<Flight>,
    /// Requests of the plan under way whose token is pending.
    pub pending: Vec<Pending>,
    /// Decoding requests that the step in flight has.
    pub decoding: u32,
    /// Somebody can only be admitted if others are preempted, which waits until no step is in flight.
    pub victims_wait: bool,
    /// Requests in [`State::Gone`].
    pub num_gone: usize,
    /// Blocks given up for identical ones while the step in flight reads them.
    pub leftovers: Vec<BlockId>,
}

/// What a step can do for a request whose sample is in flight.
enum Outlook {
    /// Its token may be pending.
    Ready,
    /// It needs to know the token first.
    Waits,
    /// It has had its last token, or may not run.
    Rests,
}

impl Engine {
    /// Looks at the step in flight, if there is one, before another is planned. False if none can be before
    /// that one's commit.
    pub(crate) fn begin_overlap(&mut self) -> bool {
        self.overlap.pending.clear();
        self.overlap.decoding = 0;
        self.overlap.active = self.in_flight();
        if !self.overlap.active {
            self.overlap.victims_wait = false;
            return true;
        }
        self.note_flights();
        let deferred = std::mem::take(&mut self.deferred);
        self.take_all(deferred);
        // How many tokens drafts yield, and thus every position behind them, is known at the commit.
        let drafting = self.config.max_draft_tokens > 0;
        !drafting && !self.overlap.victims_wait && self.find_pending()
    }

    /// Finds the requests whose next token is pending. False if most of the decoding ones need to know theirs,
    /// so that a step without them would waste its time, or if somebody must lose blocks.
    fn find_pending(&mut self) -> bool {
        let slot = usize::from(self.slots[1].in_flight);
        let planned = std::mem::take(&mut self.slots[slot].planned);
        let (mut waiting, mut lacking) = (0, 0);
        for entry in planned.iter().filter(|entry| entry.samples > 0) {
            let request = self.table.get(entry.index);
            self.overlap.decoding += u32::from(request.state == State::Decode);
            match outlook(request) {
                Outlook::Ready => {
                    lacking += u32::from(lacks_block(request, self.config.block_size));
                    self.overlap.pending.push(Pending {
                        index: entry.index,
                        sample: entry.first_sample,
                    });
                }
                Outlook::Waits => waiting += 1,
                Outlook::Rests => {}
            }
        }
        self.slots[slot].planned = planned;
        let growing = self.growing.iter().filter(|&&index| {
            let request = self.table.find_index(index);
            request.is_some_and(|request| request.state == State::Decode)
        });
        let lacking = lacking + growing.count() as u32;
        waiting <= self.num_decodes() && lacking <= self.blocks.num_free()
    }

    /// Requests that decode in the step being planned.
    pub(crate) fn num_decodes(&self) -> u32 {
        let known = self.num_decoding() as u32 - self.overlap.decoding;
        known + self.overlap.pending.len() as u32
    }

    /// Gives the requests whose token is pending a block for it.
    pub(crate) fn give_pending_room(&mut self) {
        for pending in &self.overlap.pending {
            let request = self.table.get_mut(pending.index);
            if lacks_block(request, self.config.block_size) {
                self.blocks
                    .allocate(1, &mut request.table)
                    .expect("invariant: the free blocks were counted before");
                request.note_last();
            }
        }
    }

    /// Notes which requests the steps in flight have, if that is not done.
    pub(crate) fn note_flights(&mut self) {
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if !slot.in_flight || std::mem::replace(&mut slot.noted, true) {
                continue;
            }
            for entry in &slot.planned {
                let request = self.table.get_mut(entry.index);
                request.scheduled = 0;
                let flight = &mut self.overlap.flights[request.row as usize];
                flight.slots |= 1 << at;
                flight.tokens += entry.tokens;
            }
        }
    }

    /// Whether a step in flight has the request, as far as that was noted.
    pub(crate) fn is_flying(&self, request: &Request) -> bool {
        request.row != NO_ROW && self.flight(request).slots != 0
    }

    /// What the steps in flight have of a request that holds a row.
    pub(crate) fn flight(&self, request: &Request) -> Flight {
        self.overlap.flights[request.row as usize]
    }

    /// Tokens by which a request will be longer when the step of a slot samples for it: what the step before,
    /// still in flight, gives it.
    pub(crate) fn num_pending(&self, slot: usize, request: &Request) -> u32 {
        let other = &self.slots[1 - slot];
        let before = other.in_flight && other.step < self.slots[slot].step;
        u32::from(before && self.flight(request).slots & (1 << (1 - slot)) != 0)
    }

    /// The step of a slot is over. Returns whether [`Self::land`] has to look at its requests.
    pub(crate) fn end_flight(
        &mut self,
        slot: usize,
        call: &'static str,
    ) -> Result<bool, StepError> {
        self.expect(slot, call, true)?;
        let other = &self.slots[1 - slot];
        if other.in_flight && other.step < self.slots[slot].step {
            let first = 1 - slot;
            return Err(StepError::OutOfOrder { slot, call, first });
        }
        if other.in_flight {
            self.note_flights();
        }
        self.slots[slot].in_flight = false;
        let leftovers = std::mem::take(&mut self.overlap.leftovers);
        self.blocks.release(&leftovers);
        Ok(std::mem::take(&mut self.slots[slot].noted))
    }

    /// A request's share of a step is over. Returns whether the request ended before.
    pub(crate) fn land(&mut self, slot: usize, entry: &Planned) -> bool {
        let request = self.table.get(entry.index);
        let gone = request.state == State::Gone;
        let flight = &mut self.overlap.flights[request.row as usize];
        flight.slots &= !(1 << slot);
        flight.tokens -= entry.tokens;
        if gone && flight.slots == 0 {
            self.overlap.num_gone -= 1;
            self.release(entry.index);
        }
        gone
    }

    /// Forgets all steps in flight.
    pub(crate) fn ground(&mut self) {
        for slot in &mut self.slots {
            slot.in_flight = false;
            slot.noted = false;
        }
        self.overlap.flights.fill(Flight::default());
        let gone = self.table.iter();
        let gone = gone.filter(|(_, request)| request.state == State::Gone);
        let gone: Vec<u32> = gone.map(|(index, _)| index).collect();
        self.overlap.num_gone = 0;
        for index in gone {
            self.release(index);
        }
        let leftovers = std::mem::take(&mut self.overlap.leftovers);
        self.blocks.release(&leftovers);
    }

    /// Gives back what an ended request holds, and its place in the table.
    pub(crate) fn release(&mut self, index: u32) {
        let request = self.table.get(index);
        self.blocks.release(&request.table);
        let row = request.row;
        self.table.remove(index);
        self.free_row(row);
    }

    /// Verifies what is noted of steps in flight.
    pub(crate) fn check_flights(&self) -> Result<(), String> {
        let mut noted = vec![Flight::default(); self.overlap.flights.len()];
        for (at, slot) in self.slots.iter().enumerate() {
            for entry in slot.planned.iter().filter(|_| is_noted(slot)) {
                let row = self.table.get(entry.index).row as usize;
                noted[row].slots |= 1 << at;
                noted[row].tokens += entry.tokens;
            }
        }
        for (row, (noted, flight)) in noted.iter().zip(&self.overlap.flights).enumerate() {
            if (noted.slots, noted.tokens) != (flight.slots, flight.tokens) {
                return Err(format!(
                    "row {row}: not what the steps in flight have of it"
                ));
            }
        }
        let gone = self.table.iter().map(|(_, request)| request);
        let gone: Vec<_> = gone.filter(|r| r.state == State::Gone).collect();
        if gone.len() != self.overlap.num_gone {
            return Err("ended requests".into());
        }
        if gone.iter().any(|request| !self.is_flying(request)) {
            return Err("an ended request keeps blocks that no step in flight uses".into());
        }
        if !self.in_flight() && !self.overlap.leftovers.is_empty() {
            return Err("blocks are kept for no step".into());
        }
        Ok(())
    }
}

fn is_noted(slot: &Slot) -> bool {
    slot.in_flight && slot.noted
}

fn outlook(request: &Request) -> Outlook {
    let may_run = matches!(request.state, State::Decode | State::Prefill) && !request.paused;
    // The pending token may be its last.
    if !may_run || request.tokens.len() as u32 + 1 >= request.max_len {
        return Outlook::Rests;
    }
    let edits = request.edits.as_deref();
    if edits.is_some_and(LogitEdits::follow_tokens) || request.prompt_logprobs.is_some() {
        return Outlook::Waits;
    }
    Outlook::Ready
}

/// Whether the blocks of a request have no place for the pending token, the one behind its known ones.
fn lacks_block(request: &Request, block_size: u32) -> bool {
    request.tokens.len() >= request.table.len() * block_size as usize
}
