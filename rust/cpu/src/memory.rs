//! Memory that begins at a cache line.
#![expect(unsafe_code, reason = "whole cache lines are seen as bytes")]

use crate::layout::ALIGNMENT;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// Bytes at an address that is a multiple of 64.
#[derive(Default)]
pub struct AlignedBytes {
    lines: Vec<Line>,
}

impl AlignedBytes {
    /// Makes room for at least that many bytes; what they hold is not said.
    pub fn reserve(&mut self, length: usize) {
        let lines = length.div_ceil(ALIGNMENT);
        if lines > self.lines.len() {
            self.lines.resize(lines, Line([0; ALIGNMENT]));
        }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: lines are initialised bytes without gaps.
        unsafe {
            std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * ALIGNMENT)
        }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let length = self.lines.len() * ALIGNMENT;
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), length) }
    }
}
