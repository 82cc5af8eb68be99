//! One row of logits, read in blocks.
#![expect(unsafe_code, reason = "logits are read through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use super::candidates::Candidate;
use crate::isa::Isa;
use crate::simd::{LANES, Vector, dispatch};

/// Logits of a block.
pub const BLOCK: usize = 64;

/// The tokens that a row may choose: a bit each.
#[derive(Clone, Copy)]
pub struct Mask<'a>(pub &'a [i32]);

impl Mask<'_> {
    /// The bits of a block.
    #[inline(always)]
    fn block(self, block: usize) -> u64 {
        let word = |index: usize| {
            self.0
                .get(index)
                .map_or(0, |word| u64::from(word.cast_unsigned()))
        };
        word(2 * block) | word(2 * block + 1) << 32
    }
}

/// A row and what it may choose.
pub struct RowView<'a> {
    /// The logits that count.
    pub logits: &'a [f32],
    /// None if every token is allowed.
    pub mask: Option<Mask<'a>>,
}

/// Memory for one row, used again for the next.
#[derive(Default)]
pub struct Scratch {
    /// The greatest logit of each block.
    pub maxima: Vec<f32>,
    /// Maxima, in another order.
    pub order: Vec<f32>,
    /// The sum of each block's weights.
    pub sums: Vec<f32>,
    /// The greatest logits.
    pub candidates: Vec<Candidate>,
    /// Their weights.
    pub weights: Vec<f32>,
}

/// What a look at the whole row tells.
#[derive(Clone, Copy)]
pub struct Peak {
    /// The greatest logit.
    pub value: f32,
    /// Its first token.
    pub token: usize,
    /// Whether a logit is +inf or not a number, allowed or not.
    pub is_bad: bool,
}

impl RowView<'_> {
    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        self.logits.len().div_ceil(BLOCK)
    }

    /// A block's logits, with minus infinity for what is not allowed and past the end.
    pub fn block(&self, isa: Isa, block: usize) -> [f32; BLOCK] {
        let mut logits = [0.0; BLOCK];
        let read =
            dispatch!(isa, read_block(row: &RowView<'_>, block: usize, out: &mut [f32; BLOCK]));
        // SAFETY: the instructions of `isa` are there.
        unsafe { read(self, block, &mut logits) };
        logits
    }

    /// Fills `maxima`, and finds the greatest of all.
    pub fn peak(&self, isa: Isa, maxima: &mut Vec<f32>) -> Peak {
        maxima.resize(self.blocks(), 0.0);
        let mut is_bad = false;
        let scan =
            dispatch!(isa, scan_blocks(row: &RowView<'_>, maxima: &mut [f32], is_bad: &mut bool));
        // SAFETY: the instructions of `isa` are there.
        unsafe { scan(self, maxima, &mut is_bad) };
        let value = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut token = 0;
        if !is_bad && value > f32::NEG_INFINITY {
            let first = maxima.iter().position(|maximum| *maximum >= value);
            let block = first.expect("invariant: the greatest is one of them");
            let logits = self.block(isa, block);
            let within = logits.iter().position(|logit| *logit >= value);
            token = block * BLOCK + within.expect("invariant: a block holds its greatest");
        }
        Peak {
            value,
            token,
            is_bad,
        }
    }

    /// Fills `sums` with each block's weights; their sum.
    pub fn weigh(&self, isa: Isa, scale: Scale, sums: &mut Vec<f32>) -> f64 {
        sums.resize(self.blocks(), 0.0);
        let weigh = dispatch!(
            isa,
            weigh_blocks(row: &RowView<'_>, scale: Scale, sums: &mut [f32])
        );
        // SAFETY: the instructions of `isa` are there.
        unsafe { weigh(self, scale, sums) };
        sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// How many logits are greater than `limit`.
    pub fn count_above(&self, isa: Isa, limit: f32) -> usize {
        let mut count = 0;
        let add = dispatch!(isa, count_above(row: &RowView<'_>, limit: f32, count: &mut usize));
        // SAFETY: the instructions of `isa` are there.
        unsafe { add(self, limit, &mut count) };
        count
    }
}

/// How logits become weights: e to the power of (logit - peak) / temperature.
#[derive(Clone, Copy)]
pub struct Scale {
    /// The greatest logit, finite.
    pub peak: f32,
    /// Above 0.
    pub temperature: f32,
}

/// Turns logits into weights in place.
pub fn weigh(isa: Isa, scale: Scale, logits: &mut Vec<f32>) {
    let count = logits.len();
    logits.resize(count.next_multiple_of(LANES), f32::NEG_INFINITY);
    let run = dispatch!(isa, weigh_list(scale: Scale, logits: &mut [f32]));
    // SAFETY: the instructions of `isa` are there, and the list is whole vectors.
    unsafe { run(scale, logits) };
    logits.truncate(count);
}

#[inline(always)]
unsafe fn weight<V: Vector>(scale: Scale, logits: V) -> V {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        let below = logits.sub(V::splat(scale.peak));
        below.div(V::splat(scale.temperature)).exp()
    }
}

#[inline(always)]
unsafe fn weigh_list<V: Vector>(scale: Scale, logits: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        for part in logits.chunks_exact_mut(LANES) {
            weight(scale, V::load(part.as_ptr())).store(part.as_mut_ptr());
        }
    }
}

/// A block's vectors, without its mask.
#[inline(always)]
unsafe fn load_block<V: Vector>(logits: &[f32], block: usize) -> [V; BLOCK / LANES] {
    let logits = &logits[block * BLOCK..];
    // SAFETY: the caller enabled the instructions; no more is read than there is.
    unsafe {
        let mut vectors = [V::splat(f32::NEG_INFINITY); BLOCK / LANES];
        for (index, vector) in vectors.iter_mut().enumerate() {
            let start = index * LANES;
            if start + LANES <= logits.len() {
                *vector = V::load(logits.as_ptr().add(start));
            } else if start < logits.len() {
                let count = logits.len() - start;
                let rest = V::load_first(logits.as_ptr().add(start), count);
                *vector = rest.keep((1 << count) - 1);
            }
        }
        vectors
    }
}

#[inline(always)]
unsafe fn keep_allowed<V: Vector>(
    mask: Option<Mask<'_>>,
    block: usize,
    vectors: [V; BLOCK / LANES],
) -> [V; BLOCK / LANES] {
    let mut vectors = vectors;
    if let Some(mask) = mask {
        let bits = mask.block(block);
        for (index, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: the caller enabled the instructions.
            *vector = unsafe { vector.keep((bits >> (index * LANES)) as u16) };
        }
    }
    vectors
}

#[inline(always)]
unsafe fn read_block<V: Vector>(row: &RowView<'_>, block: usize, out: &mut [f32; BLOCK]) {
    // SAFETY: the caller's promise; the array is a block.
    unsafe {
        let vectors = keep_allowed::<V>(row.mask, block, load_block(row.logits, block));
        for (vector, out) in vectors.into_iter().zip(out.chunks_exact_mut(LANES)) {
            vector.store(out.as_mut_ptr());
        }
    }
}

#[inline(always)]
unsafe fn scan_blocks<V: Vector>(row: &RowView<'_>, maxima: &mut [f32], is_bad: &mut bool) {
    // SAFETY: the caller's promise.
    unsafe {
        // Nothing that is finite, or -inf, moves it from zero.
        let mut probe = V::splat(0.0);
        for (block, maximum) in maxima.iter_mut().enumerate() {
            let vectors = load_block::<V>(row.logits, block);
            for vector in vectors {
                probe = V::splat(f32::MIN).max(vector).fma(V::splat(0.0), probe);
            }
            let mut largest = V::splat(f32::NEG_INFINITY);
            for vector in keep_allowed(row.mask, block, vectors) {
                largest = vector.max(largest);
            }
            *maximum = largest.largest();
        }
        *is_bad = probe.sum() != 0.0;
    }
}

#[inline(always)]
unsafe fn weigh_blocks<V: Vector>(row: &RowView<'_>, scale: Scale, sums: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        for (block, total) in sums.iter_mut().enumerate() {
            let mut sum = V::splat(0.0);
            for vector in keep_allowed(row.mask, block, load_block::<V>(row.logits, block)) {
                sum = sum.add(weight(scale, vector));
            }
            *total = sum.sum();
        }
    }
}

#[inline(always)]
unsafe fn count_above<V: Vector>(row: &RowView<'_>, limit: f32, count: &mut usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for block in 0..row.blocks() {
            for vector in keep_allowed(row.mask, block, load_block::<V>(row.logits, block)) {
                *count += vector.above(limit).count_ones() as usize;
            }
        }
    }
}
