//! The invariants of the engine's state, verified whole. For tests: it looks at everything.

use crate::engine::{Engine, HOLE};
use crate::queue::Kind;
use crate::request::{NO_ROW, Request, State};

impl Engine {
    /// Verifies that rows, queues, lists, blocks and requests agree; says what does not.
    pub fn check(&self) -> Result<(), String> {
        let tables = self.table.iter();
        let tables = tables.map(|(_, request)| request.table.as_slice());
        let leftovers = std::iter::once(self.overlap.leftovers.as_slice());
        self.blocks.check(tables.chain(leftovers))?;
        self.check_rows()?;
        self.check_flights()?;
        self.check_lists()?;
        for (_, request) in self.table.iter() {
            self.check_request(request)
                .map_err(|what| format!("request {} ({:?}): {what}", request.id, request.state))?;
        }
        Ok(())
    }

    fn check_rows(&self) -> Result<(), String> {
        let held = self.rows.iter().filter(|&&index| index != HOLE).count();
        ensure(held + self.free_rows.len() == self.rows.len(), || {
            format!(
                "{held} rows held + {} free != {}",
                self.free_rows.len(),
                self.rows.len()
            )
        })?;
        for (row, &index) in self
            .rows
            .iter()
            .enumerate()
            .filter(|(_, index)| **index != HOLE)
        {
            let request = self.table.get(index);
            ensure(request.row as usize == row, || {
                format!(
                    "row {row} belongs to request {}, which has {}",
                    request.id, request.row
                )
            })?;
        }
        for &row in &self.free_rows {
            ensure(self.rows[row as usize] == HOLE, || {
                format!("row {row} is free and held")
            })?;
        }
        Ok(())
    }

    /// Each request is exactly where its state says.
    fn check_lists(&self) -> Result<(), String> {
        let mut seen =
            vec![0u32; self.table.iter().map(|(i, _)| i + 1).max().unwrap_or(0) as usize];
        for (kind, index) in self.queue.iter() {
            let state = self.table.get(index).state;
            let fits = match kind {
                Kind::Active => state == State::Prefill,
                Kind::Waiting => state == State::Waiting,
            };
            ensure(fits, || {
                format!("a request in state {state:?} is queued as {kind:?}")
            })?;
            seen[index as usize] += 1;
        }
        for (at, &index) in self
            .decoding
            .iter()
            .enumerate()
            .filter(|(_, index)| **index != HOLE)
        {
            let request = self.table.get(index);
            ensure(
                request.state == State::Decode && request.decode_at as usize == at,
                || format!("request {} is at {at} of the decoding ones", request.id),
            )?;
            seen[index as usize] += 1;
        }
        let growing = |index: &u32| {
            let request = self.table.get(*index);
            let full = request.tokens.len() > request.table.len() * self.config.block_size as usize;
            !full || self.config.max_draft_tokens > 0 || self.growing.contains(index)
        };
        let mut decoding = self.decoding.iter().filter(|&&index| index != HOLE);
        ensure(decoding.all(growing), || {
            "a full decoding request is not among the growing ones".into()
        })?;
        let holes = self.decoding.iter().filter(|&&index| index == HOLE).count();
        ensure(holes == self.decoding_holes as usize, || {
            format!("{holes} holes")
        })?;
        let count = |state: State| self.table.iter().filter(|(_, r)| r.state == state).count();
        ensure(count(State::Paused) == self.num_paused, || {
            "paused requests".into()
        })?;
        for (&priority, &id) in &self.overdue {
            let request = self.table.find(id).map(|index| self.table.get(index));
            let waits =
                request.is_some_and(|r| r.state == State::Waiting && r.priority == priority);
            ensure(waits, || format!("request {id} is overdue at {priority}"))?;
        }
        ensure(count(State::Following) == self.num_following, || {
            "following choices".into()
        })?;
        for (index, request) in self.table.iter() {
            let listed = matches!(
                request.state,
                State::Waiting | State::Prefill | State::Decode
            );
            ensure(seen[index as usize] == u32::from(listed), || {
                format!(
                    "request {} is listed {} times",
                    request.id, seen[index as usize]
                )
            })?;
        }
        Ok(())
    }

    fn check_request(&self, request: &Request) -> Result<(), String> {
        let running = matches!(
            request.state,
            State::Prefill | State::Decode | State::Paused | State::Gone
        );
        ensure(running == (request.row != NO_ROW), || {
            format!("row {}", request.row)
        })?;
        if request.state == State::Gone {
            return Ok(());
        }
        let len = request.tokens.len() as u32;
        let fits = request
            .drafter
            .as_ref()
            .is_none_or(|d| d.fits(len as usize));
        ensure(fits, || format!("its drafter is ahead of {len} tokens"))?;
        ensure(request.computed < len || !running, || {
            format!("{} of {len} tokens computed", request.computed)
        })?;
        ensure(len <= request.max_len, || {
            format!("{len} tokens of {}", request.max_len)
        })?;
        if !running {
            return ensure(request.table.is_empty() && request.computed == 0, || {
                format!("holds {} blocks without a row", request.table.len())
            });
        }
        let capacity = request.table.len() as u32 * self.config.block_size;
        ensure(capacity >= request.computed, || {
            format!("{} tokens in {capacity} places", request.computed)
        })?;
        if request.state != State::Prefill {
            ensure(request.computed + 1 == len, || {
                format!("decodes with {} of {len} tokens computed", request.computed)
            })?;
        }
        let full = request.computed / self.config.block_size;
        let registered = !self.config.enable_prefix_caching || request.registered == full;
        ensure(registered, || {
            format!("{} of {full} full blocks registered", request.registered)
        })
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}
