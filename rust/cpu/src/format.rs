//! ggml's block formats, read as groups of codes with a scale and a minimum.
//!
//! Formats as in ggml-quants.h. An element is `scale * (code - zero) + minimum`, where the zero belongs
//! to the [`Layout`] that the format is packed in.

use crate::error::PackError;
use crate::half::f16_to_f32;
use crate::layout::Layout;

/// A block format of ggml that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 32 times 4 bits, scale.
    Q4_0,
    /// 32 times 4 bits, scale and minimum.
    Q4_1,
    /// 32 times 5 bits, scale.
    Q5_0,
    /// 32 times 5 bits, scale and minimum.
    Q5_1,
    /// 32 times 8 bits, scale.
    Q8_0,
    /// 256 times 4 bits; 8 scales and minima of 6 bits.
    Q4K,
    /// 256 times 5 bits; 8 scales and minima of 6 bits.
    Q5K,
    /// 256 times 6 bits; 16 scales of 8 bits.
    Q6K,
}

/// One group of a row: unsigned codes (the first `layout.group()` are used), scale and minimum.
pub struct Group {
    /// Codes with the layout's zero.
    pub codes: [u8; 32],
    /// What a step of the code is worth.
    pub scale: f32,
    /// What is added to every element.
    pub minimum: f32,
}

impl Format {
    /// The format of a ggml type number.
    pub fn from_ggml(number: u32) -> Result<Self, PackError> {
        Ok(match number {
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            _ => return Err(PackError::Format(number)),
        })
    }

    /// Elements of a block.
    pub fn block_elements(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// The layout that holds this format without loss.
    pub fn layout(self) -> Layout {
        match self {
            Self::Q4_0 => Layout::NIBBLES,
            Self::Q4_1 => Layout::NIBBLES_MINIMUM,
            Self::Q5_0 | Self::Q8_0 => Layout::BYTES,
            Self::Q5_1 => Layout::BYTES_MINIMUM,
            Self::Q4K => Layout::NIBBLES_MINIMUM_WIDE,
            Self::Q5K => Layout::BYTES_MINIMUM_WIDE,
            Self::Q6K => Layout::BYTES_WIDE_16,
        }
    }

    /// Group `index` (of the layout's size) of a row of whole blocks.
    pub fn group(self, row: &[u8], index: usize) -> Group {
        let per_block = self.block_elements() / self.layout().group();
        let size = self.block_bytes();
        let block = &row[index / per_block * size..][..size];
        match self {
            Self::Q4_0 => nibbles(&block[2..], half(block, 0), 0.0, 0),
            Self::Q4_1 => nibbles(&block[4..], half(block, 0), half(block, 2), 0),
            Self::Q5_0 => fifth_bits(nibbles(&block[6..], half(block, 0), 0.0, 112), &block[2..6]),
            Self::Q5_1 => fifth_bits(
                nibbles(&block[8..], half(block, 0), half(block, 2), 128),
                &block[4..8],
            ),
            Self::Q8_0 => Group {
                codes: std::array::from_fn(|i| block[2 + i] ^ 0x80),
                scale: half(block, 0),
                minimum: 0.0,
            },
            Self::Q4K => q4_k(block, index % per_block),
            Self::Q5K => q5_k(block, index % per_block),
            Self::Q6K => q6_k(block, index % per_block),
        }
    }
}

fn half(block: &[u8], offset: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[offset], block[offset + 1]]))
}

/// 16 bytes: the low halves are the first 16 codes. `base` is added to each.
fn nibbles(packed: &[u8], scale: f32, minimum: f32, base: u8) -> Group {
    let code = |i: usize| {
        let byte = packed[i % 16];
        if i < 16 { byte & 15 } else { byte >> 4 }
    };
    Group {
        codes: std::array::from_fn(|i| code(i) + base),
        scale,
        minimum,
    }
}

/// Adds 16 where the bit of 32 is set.
fn fifth_bits(mut group: Group, bits: &[u8]) -> Group {
    for (i, code) in group.codes.iter_mut().enumerate() {
        *code += (bits[i / 8] >> (i % 8) & 1) << 4;
    }
    group
}

/// The 6-bit scale and minimum of one of 8 sub-blocks, from 12 bytes.
fn sub_block(packed: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        let last = packed[index + 4];
        (
            last & 15 | packed[index - 4] >> 6 << 4,
            last >> 4 | packed[index] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(minimum))
}

fn q4_k(block: &[u8], index: usize) -> Group {
    let (scale, minimum) = sub_block(&block[4..16], index);
    // Two sub-blocks share 32 bytes: low halves, then high halves.
    let packed = &block[16 + index / 2 * 32..][..32];
    let shift = index % 2 * 4;
    Group {
        codes: std::array::from_fn(|i| packed[i] >> shift & 15),
        scale: half(block, 0) * scale,
        minimum: -(half(block, 2) * minimum),
    }
}

fn q5_k(block: &[u8], index: usize) -> Group {
    let (scale, minimum) = sub_block(&block[4..16], index);
    let packed = &block[48 + index / 2 * 32..][..32];
    let shift = index % 2 * 4;
    Group {
        codes: std::array::from_fn(|i| {
            128 + (packed[i] >> shift & 15) + ((block[16 + i] >> index & 1) << 4)
        }),
        scale: half(block, 0) * scale,
        minimum: -(half(block, 2) * minimum),
    }
}

/// 16 elements. In each half of the block, 64 bytes hold the low 4 bits, two runs of 32 elements over
/// each other, and 32 bytes the upper 2 bits, four runs over each other.
fn q6_k(block: &[u8], index: usize) -> Group {
    let (half_block, within) = (index / 8, index % 8);
    let (run, start) = (within / 2, within % 2 * 16);
    let low = &block[half_block * 64 + run % 2 * 32 + start..][..16];
    let high = &block[128 + half_block * 32 + start..][..16];
    let mut codes = [0; 32];
    for (i, code) in codes[..16].iter_mut().enumerate() {
        let four = low[i] >> (run / 2 * 4) & 15;
        let two = high[i] >> (run * 2) & 3;
        *code = (four | two << 4) + 96;
    }
    Group {
        codes,
        scale: half(block, 208) * f32::from(block[192 + index].cast_signed()),
        minimum: 0.0,
    }
}
