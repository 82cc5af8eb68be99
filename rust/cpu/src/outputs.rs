//! Where the results of a product go.
#![expect(unsafe_code, reason = "tasks write columns of one output")]

use crate::layout::PANEL;
use crate::pool::Pool;
use crate::tile::Output;

/// Where the results of one part go: columns of a matrix.
pub struct Outputs<'a> {
    pub(crate) start: *mut f32,
    pub(crate) stride: usize,
    pub(crate) columns: usize,
    pub(crate) accumulate: bool,
    pub(crate) bias: Option<&'a [f32]>,
}

// SAFETY: tasks write columns that are apart.
unsafe impl Sync for Outputs<'_> {}

impl Outputs<'_> {
    /// Where the results of a panel for the rows from `row` on go.
    pub(crate) fn panel(&self, panel: usize, row: usize) -> Output {
        let column = panel * PANEL;
        Output {
            start: self.start.wrapping_add(row * self.stride + column),
            stride: self.stride,
            lanes: PANEL.min(self.columns - column),
            accumulate: self.accumulate,
            bias: self
                .bias
                .map_or(std::ptr::null(), |bias| bias[column..][..PANEL].as_ptr()),
        }
    }

    /// How many panels there are, and how many of them a task should take: four tasks a thread, so that
    /// one that comes late takes fewer.
    pub(crate) fn panels(&self, pool: &Pool) -> (usize, usize) {
        let panels = self.columns.div_ceil(PANEL);
        (panels, panels.div_ceil(4 * pool.threads()))
    }
}
