//! How packed weights lie in memory.
//!
//! 16 outputs form a panel, the unit of work. A panel holds, one region behind the other,
//!
//! - the codes: for each group of inputs and each step of 4 inputs within it, 64 bytes: 4 codes for
//!   each of the 16 outputs. Codes of 4 bits share such a run: the low halves belong to the first
//!   half of the group's steps, the high halves to the second;
//! - the scales: for each group, 16 numbers;
//! - the minima, likewise, if there are any.
//!
//! An element is `scale * (code - zero) + minimum`.

/// Outputs of a panel.
pub const PANEL: usize = 16;

/// Inputs that one step multiplies: what 32-bit lanes of bytes hold.
pub const STEP: usize = 4;

/// Panels begin at cache lines, and so does every run of codes.
pub const ALIGNMENT: usize = 64;

/// What a packed matrix consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    nibbles: bool,
    minimum: bool,
    wide: bool,
    group: usize,
}

impl Layout {
    const fn new(nibbles: bool, minimum: bool, wide: bool, group: usize) -> Self {
        Self {
            nibbles,
            minimum,
            wide,
            group,
        }
    }

    /// Codes of 4 bits around 8.
    pub const NIBBLES: Self = Self::new(true, false, false, 32);
    /// Codes of 4 bits from 0, with minima.
    pub const NIBBLES_MINIMUM: Self = Self::new(true, true, false, 32);
    /// The same with scales and minima in 32 bits.
    pub const NIBBLES_MINIMUM_WIDE: Self = Self::new(true, true, true, 32);
    /// Codes of 8 bits around 128.
    pub const BYTES: Self = Self::new(false, false, false, 32);
    /// The same with minima.
    pub const BYTES_MINIMUM: Self = Self::new(false, true, false, 32);
    /// Codes of 8 bits with scales in 32 bits.
    pub const BYTES_WIDE: Self = Self::new(false, false, true, 32);
    /// The same with minima.
    pub const BYTES_MINIMUM_WIDE: Self = Self::new(false, true, true, 32);
    /// Codes of 8 bits in groups of 16 with scales in 32 bits.
    pub const BYTES_WIDE_16: Self = Self::new(false, false, true, 16);

    /// All of them, for tests.
    pub const ALL: [Self; 8] = [
        Self::NIBBLES,
        Self::NIBBLES_MINIMUM,
        Self::NIBBLES_MINIMUM_WIDE,
        Self::BYTES,
        Self::BYTES_MINIMUM,
        Self::BYTES_WIDE,
        Self::BYTES_MINIMUM_WIDE,
        Self::BYTES_WIDE_16,
    ];

    /// Whether codes have 4 bits, not 8.
    pub const fn has_nibbles(self) -> bool {
        self.nibbles
    }

    /// Whether there are minima.
    pub const fn has_minimum(self) -> bool {
        self.minimum
    }

    /// Whether scales and minima are 32-bit floats, not 16-bit ones.
    pub const fn is_wide(self) -> bool {
        self.wide
    }

    /// Inputs that share a scale.
    pub const fn group(self) -> usize {
        self.group
    }

    /// The code of zero.
    pub const fn zero(self) -> i32 {
        match (self.nibbles, self.minimum) {
            (true, true) => 0,
            (true, false) => 8,
            (false, _) => 128,
        }
    }

    /// Steps of a group.
    pub const fn steps(self) -> usize {
        self.group / STEP
    }

    /// Bytes of the codes of one group of a panel.
    pub const fn code_bytes(self) -> usize {
        let bytes = PANEL * self.group;
        if self.nibbles { bytes / 2 } else { bytes }
    }

    /// Bytes of the scales of one group of a panel.
    pub const fn scale_bytes(self) -> usize {
        if self.wide { 4 * PANEL } else { 2 * PANEL }
    }

    /// Bytes of a panel of that many groups, padded to whole cache lines.
    pub const fn panel_bytes(self, groups: usize) -> usize {
        let minima = if self.minimum { self.scale_bytes() } else { 0 };
        let bytes = groups * (self.code_bytes() + self.scale_bytes() + minima);
        bytes.next_multiple_of(ALIGNMENT)
    }

    /// Where in a panel the scales of a group begin.
    pub const fn scale_offset(self, groups: usize, group: usize) -> usize {
        groups * self.code_bytes() + group * self.scale_bytes()
    }

    /// Where in a panel the minima of a group begin.
    pub const fn minimum_offset(self, groups: usize, group: usize) -> usize {
        self.scale_offset(groups, groups) + group * self.scale_bytes()
    }

    /// Where in a panel the code of an output and input lies: the byte, and how far to shift it.
    pub const fn code_place(self, group: usize, output: usize, input: usize) -> (usize, u32) {
        let (step, byte) = (input / STEP, input % STEP);
        let (run, shift) = if self.nibbles && step >= self.steps() / 2 {
            (step - self.steps() / 2, 4)
        } else {
            (step, 0)
        };
        let place = group * self.code_bytes() + run * PANEL * STEP + output * STEP + byte;
        (place, shift)
    }
}
