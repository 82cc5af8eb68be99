//! Memory that begins at a cache line.
#![expect(unsafe_code, reason = "whole cache lines are seen as bytes or numbers")]

use crate::layout::ALIGNMENT;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// Bytes at an address that is a multiple of 64, zero at first.
#[derive(Default)]
pub struct AlignedBytes {
    lines: Vec<Line>,
    length: usize,
}

impl AlignedBytes {
    /// That many bytes.
    pub fn new(length: usize) -> Self {
        let lines = vec![Line([0; ALIGNMENT]); length.div_ceil(ALIGNMENT)];
        Self { lines, length }
    }

    /// Makes room for at least that many bytes; what they hold is not said.
    pub fn reserve(&mut self, length: usize) {
        let lines = length.div_ceil(ALIGNMENT);
        if lines > self.lines.len() {
            self.lines.resize(lines, Line([0; ALIGNMENT]));
        }
        self.length = self.lines.len() * ALIGNMENT;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the lines hold at least `length` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.length) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.length) }
    }
}
