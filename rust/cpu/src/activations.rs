//! A linear layer's inputs, quantised to 8 bits.
//!
//! Each row is cut into the groups of the weights; a group has a scale of its own, so that an outlier
//! costs the precision of its neighbours alone. Rows lie in tiles of up to 8. Within a tile, for each
//! step of 4 inputs, the 4 bytes of each row lie side by side, so that a kernel finds all it needs at
//! fixed distances.
#![expect(unsafe_code, reason = "rows are read and written through vectors")]
#![expect(
    clippy::inline_always,
    reason = "instructions are available only where the caller enabled them"
)]

use crate::isa::Isa;
use crate::layout::{Layout, STEP};
use crate::memory::AlignedBytes;
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{LANES, Vector, dispatch};

/// Rows of a tile.
pub const TILE: usize = 8;

/// Below this a group counts as zero: its reciprocal would not be finite.
const SMALLEST: f32 = 1e-36;

/// Quantised rows; the memory is reused from call to call.
#[derive(Default)]
pub struct Activations {
    codes: AlignedBytes,
    /// For each tile, group and row: a code's worth.
    scales: Vec<f32>,
    /// Likewise: the sum of the group's inputs, as quantised, which a minimum is multiplied by.
    sums: Vec<f32>,
    /// Likewise: what the product with the code of zero is subtracted by.
    offsets: Vec<i32>,
    rows: usize,
    columns: usize,
    layout: Option<Layout>,
}

/// One tile, as a kernel takes it.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Rows, at most 8.
    pub width: usize,
    /// Codes, from the tile's first group on.
    pub codes: *const u8,
    /// Scales, from the tile's first group on: `width` for each group.
    pub scales: *const f32,
    /// Sums, likewise.
    pub sums: *const f32,
    /// Offsets, likewise.
    pub offsets: *const i32,
}

impl Activations {
    /// Makes room for rows to be multiplied with weights of a layout.
    pub fn resize(&mut self, layout: Layout, rows: usize, columns: usize) {
        let groups = rows * columns / layout.group();
        self.codes.reserve(rows * columns);
        self.scales.resize(groups, 0.0);
        self.sums.resize(groups, 0.0);
        self.offsets.resize(groups, 0);
        (self.rows, self.columns, self.layout) = (rows, columns, Some(layout));
    }

    /// Quantises all rows. `input` gives each, in order, the buffer to be used or another slice.
    pub fn fill<'a>(
        &mut self,
        isa: Isa,
        pool: &Pool,
        input: &(dyn Fn(usize, &mut Vec<f32>) -> RowSource<'a> + Sync),
    ) {
        let layout = self.layout.expect("invariant: resized before it is filled");
        let (rows, columns) = (self.rows, self.columns);
        let per_row = columns / layout.group();
        let codes = SharedMut::new(self.codes.as_mut_slice());
        let scales = SharedMut::new(&mut self.scales);
        let sums = SharedMut::new(&mut self.sums);
        let offsets = SharedMut::new(&mut self.offsets);
        let quantize = dispatch!(isa, quantize_row(row: &[f32], out: &mut RowOut<'_>));
        let tile = |tile: usize| {
            let first = tile * TILE;
            let width = TILE.min(rows - first);
            let (start, count) = (first * per_row, width * per_row);
            let mut buffer = Vec::new();
            let mut out = RowOut {
                layout,
                width,
                row: 0,
                codes: codes.part(first * columns, width * columns),
                scales: scales.part(start, count),
                sums: sums.part(start, count),
                offsets: offsets.part(start, count),
            };
            for row in 0..width {
                out.row = row;
                let source = input(first + row, &mut buffer);
                let values = match source {
                    RowSource::Buffer => &buffer[..],
                    RowSource::Slice(slice) => slice,
                };
                assert_eq!(values.len(), columns);
                // SAFETY: the instructions of `isa` are there.
                unsafe { quantize(values, &mut out) };
            }
        };
        let tiles = rows.div_ceil(TILE);
        if rows * columns < 8192 {
            // Less than what it takes to share it out.
            (0..tiles).for_each(tile);
        } else {
            pool.run(tiles, &tile);
        }
    }

    /// How many tiles there are.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// One tile.
    pub fn tile(&self, index: usize) -> Tile {
        let layout = self.layout.expect("invariant: resized before it is used");
        let first = index * TILE;
        let group = first * (self.columns / layout.group());
        Tile {
            width: TILE.min(self.rows - first),
            codes: self.codes.as_slice()[first * self.columns..].as_ptr(),
            scales: self.scales[group..].as_ptr(),
            sums: self.sums[group..].as_ptr(),
            offsets: self.offsets[group..].as_ptr(),
        }
    }
}

/// Where a row's inputs are.
pub enum RowSource<'a> {
    /// In the buffer.
    Buffer,
    /// Somewhere else.
    Slice(&'a [f32]),
}

struct RowOut<'a> {
    layout: Layout,
    width: usize,
    row: usize,
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
    offsets: &'a mut [i32],
}

/// # Safety
///
/// The instructions of `V` must be enabled.
#[inline(always)]
unsafe fn quantize_row<V: Vector>(row: &[f32], out: &mut RowOut<'_>) {
    let (size, zero) = (out.layout.group(), out.layout.zero());
    for (index, values) in row.chunks_exact(size).enumerate() {
        let mut codes = [0_i8; 2 * LANES];
        // SAFETY: a group is one or two vectors.
        let (scale, sum) = unsafe { quantize_group::<V>(values, &mut codes) };
        let place = index * out.width + out.row;
        out.scales[place] = scale;
        out.sums[place] = scale * sum;
        out.offsets[place] = -zero * sum as i32;
        let steps = size / STEP;
        for (step, bytes) in codes[..size].chunks_exact(STEP).enumerate() {
            let place = ((index * steps + step) * out.width + out.row) * STEP;
            let target = &mut out.codes[place..][..STEP];
            for (to, from) in target.iter_mut().zip(bytes) {
                *to = from.cast_unsigned();
            }
        }
    }
}

/// The scale, and the sum of the codes. The scale is not a number if an input is not finite.
///
/// # Safety
///
/// The instructions of `V` must be enabled, and there must be 16 or 32 values.
#[inline(always)]
unsafe fn quantize_group<V: Vector>(values: &[f32], codes: &mut [i8; 2 * LANES]) -> (f32, f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = V::splat(0.0);
        let mut probe = V::splat(0.0);
        for part in values.chunks_exact(LANES) {
            let part = V::load(part.as_ptr());
            largest = largest.max(part.abs());
            probe = probe.add(part.sub(part));
        }
        let largest = largest.largest();
        let probe = probe.sum();
        if probe != 0.0 || largest < SMALLEST {
            *codes = [0; 2 * LANES];
            return (probe, 0.0);
        }
        let reciprocal = V::splat(127.0 / largest);
        let mut sum = V::splat(0.0);
        for (part, codes) in values
            .chunks_exact(LANES)
            .zip(codes.chunks_exact_mut(LANES))
        {
            let rounded = V::load(part.as_ptr()).mul(reciprocal).round();
            sum = sum.add(rounded);
            rounded.store_i8(codes.as_mut_ptr());
        }
        (largest / 127.0, sum.sum())
    }
}
