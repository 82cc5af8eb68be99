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

/// Inputs of the largest groups.
const WIDEST: usize = 2 * LANES;

/// Groups of a row that are rounded together.
const BATCH: usize = 16;

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

/// In three passes over a few groups at a time: horizontal sums and maxima take long, and many of them
/// are under way at once where nothing else stands between.
///
/// # Safety
///
/// The instructions of `V` must be enabled, and the row must be whole groups of 16 or 32.
#[inline(always)]
unsafe fn quantize_row<V: Vector>(row: &[f32], out: &mut RowOut<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if out.layout.group() == LANES {
            quantize_groups::<V, LANES>(row, out);
        } else {
            quantize_groups::<V, WIDEST>(row, out);
        }
    }
}

/// `quantize_row` for groups of `SIZE`, which the compiler unrolls.
#[inline(always)]
unsafe fn quantize_groups<V: Vector, const SIZE: usize>(row: &[f32], out: &mut RowOut<'_>) {
    let (groups, _) = row.as_chunks::<SIZE>();
    for (batch, groups) in groups.chunks(BATCH).enumerate() {
        let (mut largest, mut reciprocals) = ([0.0_f32; BATCH], [0.0_f32; BATCH]);
        for (largest, group) in largest.iter_mut().zip(groups) {
            // SAFETY: the caller's promise.
            *largest = unsafe { magnitude::<V>(group) };
        }
        for (reciprocal, largest) in reciprocals.iter_mut().zip(&largest) {
            *reciprocal = if *largest < SMALLEST {
                0.0
            } else {
                127.0 / largest
            };
        }
        for (index, group) in groups.iter().enumerate() {
            let mut codes = [0_i8; SIZE];
            // SAFETY: the caller's promise.
            let sum = unsafe { round::<V>(group, reciprocals[index], &mut codes) };
            out.put(batch * BATCH + index, largest[index] / 127.0, sum, &codes);
        }
    }
}

/// The largest magnitude.
///
/// # Safety
///
/// As for `quantize_row`.
#[inline(always)]
unsafe fn magnitude<V: Vector>(group: &[f32]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = V::splat(0.0);
        for part in group.chunks_exact(LANES) {
            largest = largest.max(V::load(part.as_ptr()).abs());
        }
        largest.largest()
    }
}

/// The codes, and their sum: not a number if an input is not finite, for then neither is its product with
/// the reciprocal.
///
/// # Safety
///
/// As for `quantize_row`.
#[inline(always)]
unsafe fn round<V: Vector>(group: &[f32], reciprocal: f32, codes: &mut [i8]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let reciprocal = V::splat(reciprocal);
        let mut sum = V::splat(0.0);
        for (part, codes) in group.chunks_exact(LANES).zip(codes.chunks_exact_mut(LANES)) {
            let rounded = V::load(part.as_ptr()).mul(reciprocal).round();
            sum = sum.add(rounded);
            rounded.store_i8(codes.as_mut_ptr());
        }
        sum.sum()
    }
}

impl RowOut<'_> {
    /// Puts a group where the kernels look for it.
    #[inline(always)]
    fn put<const SIZE: usize>(&mut self, group: usize, scale: f32, sum: f32, codes: &[i8; SIZE]) {
        let place = group * self.width + self.row;
        let is_finite = !sum.is_nan();
        let (scale, sum) = if is_finite { (scale, sum) } else { (sum, 0.0) };
        self.scales[place] = scale;
        self.sums[place] = scale * sum;
        self.offsets[place] = -self.layout.zero() * sum as i32;
        let target = &mut self.codes[group * SIZE * self.width..][..SIZE * self.width];
        let (steps, _) = codes.as_chunks::<STEP>();
        for (index, step) in steps.iter().enumerate() {
            let four = i32::from_ne_bytes(step.map(i8::cast_unsigned));
            let place = (index * self.width + self.row) * STEP;
            debug_assert!(place + STEP <= target.len());
            // SAFETY: within the group, and at a multiple of 4 from the start of a cache line. Volatile, as
            // the compiler would gather these stores into a scatter, which takes several times as long.
            #[expect(clippy::cast_ptr_alignment, reason = "it is aligned, as said")]
            unsafe {
                let to = target.as_mut_ptr().add(place).cast::<i32>();
                to.write_volatile(if is_finite { four } else { 0 });
            }
        }
    }
}
