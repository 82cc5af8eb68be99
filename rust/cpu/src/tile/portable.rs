//! A panel times a tile in plain code.
#![expect(unsafe_code, reason = "kernels read and write raw memory")]

use super::{Kernel, TileJob, by_layout};
use crate::half::f16_to_f32;
use crate::layout::{Layout, PANEL, STEP};
use crate::simd::{Vector, portable::Portable};

/// The kernel, for tiles of any width.
pub fn kernel(layout: Layout) -> Kernel {
    by_layout!(layout, |INDEX| multiply::<INDEX>)
}

unsafe fn multiply<const LAYOUT: usize>(job: &TileJob) {
    let layout = const { Layout::ALL[LAYOUT] };
    for row in 0..job.tile.width {
        let mut total = [0.0_f32; PANEL];
        for group in 0..job.groups {
            // SAFETY: the caller's promise.
            unsafe { add_group(layout, job, row, group, &mut total) };
        }
        // SAFETY: the caller's promise.
        unsafe { job.output.write(row, Portable::load(total.as_ptr())) };
    }
}

#[inline]
unsafe fn add_group(
    layout: Layout,
    job: &TileJob,
    row: usize,
    group: usize,
    total: &mut [f32; PANEL],
) {
    let (tile, steps) = (&job.tile, layout.steps());
    let place = group * tile.width + row;
    // SAFETY: the caller's promise; the layout says where things are.
    unsafe {
        let mut dots = [*tile.offsets.add(place); PANEL];
        let codes = job.panel.add(group * layout.code_bytes());
        for step in 0..steps {
            let inputs = tile
                .codes
                .add(((group * steps + step) * tile.width + row) * STEP);
            let inputs = inputs.cast::<[i8; STEP]>().read().map(i32::from);
            let (place, shift) = layout.code_place(0, 0, step * STEP);
            let mask = if layout.has_nibbles() { 15 } else { 255 };
            let weights = codes.add(place).cast::<[[u8; STEP]; PANEL]>().read();
            for (dot, weights) in dots.iter_mut().zip(weights) {
                for (weight, input) in weights.iter().zip(inputs) {
                    *dot += i32::from(weight >> shift & mask) * input;
                }
            }
        }
        let scales = numbers(
            layout,
            job.panel.add(layout.scale_offset(job.groups, group)),
        );
        let input_scale = *tile.scales.add(place);
        for ((total, dot), scale) in total.iter_mut().zip(dots).zip(scales) {
            *total += dot as f32 * scale * input_scale;
        }
        if layout.has_minimum() {
            let minima = numbers(
                layout,
                job.panel.add(layout.minimum_offset(job.groups, group)),
            );
            let sum = *tile.sums.add(place);
            for (total, minimum) in total.iter_mut().zip(minima) {
                *total += minimum * sum;
            }
        }
    }
}

unsafe fn numbers(layout: Layout, from: *const u8) -> [f32; PANEL] {
    // SAFETY: 16 numbers lie there.
    unsafe {
        if layout.is_wide() {
            from.cast::<[f32; PANEL]>().read_unaligned()
        } else {
            from.cast::<[u16; PANEL]>().read_unaligned().map(f16_to_f32)
        }
    }
}
