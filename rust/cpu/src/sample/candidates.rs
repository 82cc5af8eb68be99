//! The greatest logits of a row, in order, without a sort of the row.

use super::row::{BLOCK, RowView, Scratch};
use crate::isa::Isa;

/// How many blocks are looked into, in turn, until the candidates suffice.
const WIDTHS: [usize; 3] = [64, 512, 8192];

/// A logit and its token, as a key that is smaller for a greater logit, and for a smaller token where
/// logits are equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate(u64);

impl Candidate {
    fn new(logit: f32, token: usize) -> Self {
        // Adding zero makes both zeros one; the bits of floats then have the floats' order, but for the
        // sign and the order of negative ones.
        let bits = (logit + 0.0).to_bits();
        let ascending = if bits >> 31 == 0 {
            bits | 1 << 31
        } else {
            !bits
        };
        Self(u64::from(!ascending) << 32 | token as u64)
    }

    /// The token.
    pub fn token(self) -> usize {
        self.0 as u32 as usize
    }

    /// The logit.
    pub fn logit(self) -> f32 {
        let ascending = !((self.0 >> 32) as u32);
        f32::from_bits(if ascending >> 31 == 1 {
            ascending & !(1 << 31)
        } else {
            !ascending
        })
    }
}

/// Lists of candidates, each longer than the one before, up to the whole row. `scratch.maxima` must be
/// filled. Calls `look` with each, and whether it is the row, until that says that it sufficed.
pub fn search(
    isa: Isa,
    row: &RowView<'_>,
    scratch: &mut Scratch,
    at_least: usize,
    mut look: impl FnMut(&mut Scratch, bool) -> bool,
) {
    for width in WIDTHS {
        if width > at_least && width < row.blocks() {
            scratch.order.clone_from(&scratch.maxima);
            let (_, limit, _) = scratch
                .order
                .select_nth_unstable_by(width - 1, |a, b| b.total_cmp(a));
            let limit = *limit;
            collect(isa, row, scratch, limit);
            if look(scratch, false) {
                return;
            }
        }
    }
    collect(isa, row, scratch, f32::NEG_INFINITY);
    look(scratch, true);
}

/// All logits from `limit` on: they are in blocks whose greatest is no less.
fn collect(isa: Isa, row: &RowView<'_>, scratch: &mut Scratch, limit: f32) {
    scratch.candidates.clear();
    for (block, maximum) in scratch.maxima.iter().enumerate() {
        if *maximum < limit {
            continue;
        }
        let first = block * BLOCK;
        let count = BLOCK.min(row.logits.len() - first);
        for (offset, logit) in row.block(isa, block)[..count].iter().enumerate() {
            if *logit >= limit {
                scratch
                    .candidates
                    .push(Candidate::new(*logit, first + offset));
            }
        }
    }
}

impl Scratch {
    /// Puts the first `count` candidates in order and forgets the others; 0 keeps all.
    pub fn sort(&mut self, count: usize) {
        if count > 0 && count < self.candidates.len() {
            self.candidates.select_nth_unstable(count - 1);
            self.candidates.truncate(count);
        }
        self.candidates.sort_unstable();
    }
}
