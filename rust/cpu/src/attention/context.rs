//! A run of a request's context, as the kernels read it.

use super::Request;
use super::cache::LayerCache;

/// Keys that are attended at a time.
pub const RUN: usize = 256;

/// The slots of up to 256 positions.
pub struct Slots {
    slots: [usize; RUN],
    count: usize,
}

impl Slots {
    /// The slots of the positions from `first` to before `end`, at most 256.
    pub fn new(cache: &LayerCache, request: &Request<'_>, first: usize, end: usize) -> Self {
        debug_assert!(first < end && end <= request.length && end - first <= RUN);
        let size = cache.block_size();
        let mut slots = [0; RUN];
        let mut position = first;
        while position < end {
            let (block, offset) = (position / size, position % size);
            let start = request.blocks[block] as usize * size;
            let run = (size - offset).min(end - position);
            for (index, slot) in slots[position - first..][..run].iter_mut().enumerate() {
                *slot = start + offset + index;
            }
            position += run;
        }
        Self {
            slots,
            count: end - first,
        }
    }

    /// The slots, in order.
    pub fn get(&self) -> &[usize] {
        &self.slots[..self.count]
    }
}
