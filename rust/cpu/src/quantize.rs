//! From float32 weights to codes.

use crate::format::Group;
use crate::layout::Layout;

/// How many bits a weight is quantised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 4 bits, with a scale and a minimum.
    Four,
    /// 8 bits, with a scale.
    Eight,
}

impl Bits {
    /// The layout of such weights.
    pub fn layout(self) -> Layout {
        match self {
            Self::Four => Layout::NIBBLES_MINIMUM_WIDE,
            Self::Eight => Layout::BYTES_WIDE,
        }
    }
}

/// The codes of one group of finite weights.
pub fn group(bits: Bits, values: &[f32]) -> Group {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (minimum, scale, zero, most) = match bits {
        // Divided before they are subtracted: the range may exceed what a float holds.
        Bits::Four => (low, high / 15.0 - low / 15.0, 0.0, 15.0),
        Bits::Eight => (0.0, high.max(-low) / 127.0, 128.0, 255.0),
    };
    let mut codes = [0; 32];
    for (code, value) in codes.iter_mut().zip(values) {
        let steps = value / scale - minimum / scale;
        // Equal weights have no range: any code stands for them.
        let steps = if steps.is_finite() { steps } else { 0.0 };
        *code = (steps.round_ties_even() + zero).clamp(0.0, most) as u8;
    }
    Group {
        codes,
        scale,
        minimum,
    }
}
