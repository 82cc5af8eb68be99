//! A quantised matrix, packed for the kernels.

use crate::arena::WeightBytes;
use crate::error::PackError;
use crate::format::{Format, Group};
use crate::half::{f16_to_f32, f32_to_f16};
use crate::layout::{Layout, PANEL};
use crate::pool::Pool;
use crate::quantize::{self, Bits};
use crate::shared::SharedMut;

/// Weights [rows, columns], row by row the outputs of a linear layer, in panels of 16 rows.
pub struct PackedMatrix {
    layout: Layout,
    rows: usize,
    columns: usize,
    bytes: WeightBytes,
}

impl PackedMatrix {
    /// Packs the raw bytes of a GGUF tensor. No precision is lost.
    pub fn from_ggml(
        format: Format,
        data: &[u8],
        rows: usize,
        columns: usize,
        pool: &Pool,
    ) -> Result<Self, PackError> {
        let block = format.block_elements();
        let mut matrix = Self::empty(format.layout(), rows, columns, block)?;
        let row_bytes = columns / block * format.block_bytes();
        check_length(rows, columns, "bytes", rows * row_bytes, data.len())?;
        matrix.fill(pool, |row, group| {
            format.group(&data[row * row_bytes..][..row_bytes], group)
        });
        Ok(matrix)
    }

    /// Quantises float32 weights in groups of 32, to the nearest code.
    pub fn from_floats(
        bits: Bits,
        data: &[f32],
        rows: usize,
        columns: usize,
        pool: &Pool,
    ) -> Result<Self, PackError> {
        let layout = bits.layout();
        let mut matrix = Self::empty(layout, rows, columns, layout.group())?;
        check_length(rows, columns, "numbers", rows * columns, data.len())?;
        for (row, values) in data.chunks_exact(columns).enumerate() {
            if !values.iter().all(|value| value.is_finite()) {
                return Err(PackError::NotFinite { row });
            }
        }
        matrix.fill(pool, |row, group| {
            quantize::group(
                bits,
                &data[row * columns + group * layout.group()..][..layout.group()],
            )
        });
        Ok(matrix)
    }

    fn empty(layout: Layout, rows: usize, columns: usize, unit: usize) -> Result<Self, PackError> {
        if rows == 0
            || columns == 0
            || rows
                .checked_mul(columns)
                .is_none_or(|n| n > isize::MAX as usize / 8)
        {
            return Err(PackError::Shape { rows, columns });
        }
        if !columns.is_multiple_of(unit) {
            return Err(PackError::Columns {
                columns,
                group: unit,
            });
        }
        let panel = layout.panel_bytes(columns / layout.group());
        Ok(Self {
            layout,
            rows,
            columns,
            bytes: WeightBytes::new(rows.div_ceil(PANEL) * panel)?,
        })
    }

    fn fill(&mut self, pool: &Pool, group: impl Fn(usize, usize) -> Group + Sync) {
        let (layout, groups, rows) = (self.layout, self.groups(), self.rows);
        let size = layout.panel_bytes(groups);
        let panels = SharedMut::new(self.bytes.as_mut_slice());
        pool.run(rows.div_ceil(PANEL), &|panel| {
            let bytes = panels.part(panel * size, size);
            for output in 0..PANEL.min(rows - panel * PANEL) {
                for index in 0..groups {
                    let group = group(panel * PANEL + output, index);
                    write_group(layout, bytes, groups, index, output, &group);
                }
            }
        });
    }

    /// How the weights are packed.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Groups of inputs.
    pub fn groups(&self) -> usize {
        self.columns / self.layout.group()
    }

    /// Bytes that the weights take.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// One panel's bytes.
    pub fn panel(&self, panel: usize) -> &[u8] {
        let size = self.layout.panel_bytes(self.groups());
        &self.bytes.as_slice()[panel * size..][..size]
    }

    /// The row's weights as float32.
    ///
    /// Panics if the row does not exist or `out` is not that long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns);
        let (panel, output) = (self.panel(row / PANEL), row % PANEL);
        let (layout, groups) = (self.layout, self.groups());
        for (index, values) in out.chunks_exact_mut(layout.group()).enumerate() {
            let scale = read_scale(layout, &panel[layout.scale_offset(groups, index)..], output);
            let minimum = if layout.has_minimum() {
                read_scale(
                    layout,
                    &panel[layout.minimum_offset(groups, index)..],
                    output,
                )
            } else {
                0.0
            };
            for (input, value) in values.iter_mut().enumerate() {
                let (place, shift) = layout.code_place(index, output, input);
                let mask = if layout.has_nibbles() { 15 } else { 255 };
                let code = i32::from(panel[place] >> shift & mask) - layout.zero();
                *value = scale * code as f32 + minimum;
            }
        }
    }
}

fn check_length(
    rows: usize,
    columns: usize,
    unit: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), PackError> {
    if got == expected {
        return Ok(());
    }
    Err(PackError::Length {
        rows,
        columns,
        unit,
        expected,
        got,
    })
}

fn write_group(
    layout: Layout,
    panel: &mut [u8],
    groups: usize,
    index: usize,
    output: usize,
    group: &Group,
) {
    for (input, code) in group.codes[..layout.group()].iter().enumerate() {
        let (place, shift) = layout.code_place(index, output, input);
        panel[place] |= code << shift;
    }
    write_scale(
        layout,
        &mut panel[layout.scale_offset(groups, index)..],
        output,
        group.scale,
    );
    if layout.has_minimum() {
        let place = layout.minimum_offset(groups, index);
        write_scale(layout, &mut panel[place..], output, group.minimum);
    }
}

fn write_scale(layout: Layout, numbers: &mut [u8], output: usize, value: f32) {
    if layout.is_wide() {
        numbers[4 * output..][..4].copy_from_slice(&value.to_ne_bytes());
    } else {
        numbers[2 * output..][..2].copy_from_slice(&f32_to_f16(value).to_ne_bytes());
    }
}

fn read_scale(layout: Layout, numbers: &[u8], output: usize) -> f32 {
    if layout.is_wide() {
        let bytes = &numbers[4 * output..][..4];
        f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    } else {
        let bytes = &numbers[2 * output..][..2];
        f16_to_f32(u16::from_ne_bytes([bytes[0], bytes[1]]))
    }
}
