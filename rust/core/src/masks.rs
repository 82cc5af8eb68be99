//! The masks of a planned step: computed beside the forward pass, written before its logits are sampled.

use std::cell::Cell;
use std::sync::Arc;

use crate::edits::LogitEdits;
use crate::engine::{Engine, Planned};
use crate::error::StepError;
use crate::grammar::{Cursor, Limit};
use crate::request::Request;

impl Engine {
    /// Has the masks of a step computed by threads of their own.
    pub(crate) fn start_masks(&mut self, slot: usize) {
        if self.slots[slot].num_masks > 0 {
            let work = self.work(slot);
            self.mask_workers.compute(work.into_iter());
        }
    }

    /// What must be finished before [`Self::fill_masks`] has nothing to wait for; any thread may see to it.
    pub fn mask_work(&self, slot: usize) -> Result<Vec<Arc<Cursor>>, StepError> {
        self.expect(slot, "mask_work", true)?;
        Ok(self.work(slot))
    }

    /// Writes the masks of a planned step: `rows`, the row of logits of each, and `bits`, int32
    /// \[rows, words\], one bit for each id of the vocabulary, the lowest first. Rows of logits that are not
    /// named may be any token. Returns how many there are, which is what the header says.
    pub fn fill_masks(
        &self,
        slot: usize,
        rows: &[Cell<i32>],
        bits: &[Cell<i32>],
    ) -> Result<usize, StepError> {
        self.expect(slot, "fill_masks", true)?;
        let needed = self.slots[slot].num_masks;
        if rows.len() < needed {
            return Err(StepError::ArrayLength {
                name: "mask rows",
                needed,
                actual: rows.len(),
            });
        }
        let words = bits.len() / rows.len().max(1);
        let masked = self.masked(slot);
        for (at, (planned, request, edits)) in masked.enumerate() {
            rows[at].set(planned.first_sample as i32);
            edits.write_mask(request.output(), &bits[at * words..(at + 1) * words]);
        }
        Ok(needed)
    }

    fn work(&self, slot: usize) -> Vec<Arc<Cursor>> {
        self.masked(slot)
            .filter_map(|(_, _, edits)| edits.limit().and_then(Limit::work))
            .cloned()
            .collect()
    }

    /// The requests of a step whose next token a mask limits.
    fn masked(&self, slot: usize) -> impl Iterator<Item = (&Planned, &Request, &LogitEdits)> {
        let planned = self.slots[slot].planned.iter();
        planned.filter_map(|planned| {
            let request = self.table.get(planned.index);
            let edits = request.edits.as_deref()?;
            (planned.samples > 0 && edits.is_masked()).then_some((planned, request, edits))
        })
    }
}
