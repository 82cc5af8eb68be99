//! Random numbers and random tensors.
#![allow(dead_code, reason = "each test uses its part")]

use miniinfer_cpu::format::Format;
use miniinfer_cpu::half::f32_to_f16;

/// splitmix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Roughly normal: the sum of 12 uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..12)
            .map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32)
            .sum::<f32>()
            - 6.0
    }
}

pub fn formats() -> [Format; 8] {
    [
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ]
}

/// Random blocks whose scales are numbers of a sensible size, some of them 0 and negative.
pub fn ggml_rows(format: Format, rows: usize, columns: usize, random: &mut Random) -> Vec<u8> {
    let blocks = rows * columns / format.block_elements();
    let mut data = Vec::new();
    for _ in 0..blocks {
        let mut block: Vec<u8> = (0..format.block_bytes())
            .map(|_| random.next() as u8)
            .collect();
        let places: &[usize] = match format {
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => &[0],
            Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q6K => &[208],
        };
        for place in places {
            let value = if random.below(8) == 0 {
                0.0
            } else {
                random.normal() * 0.1
            };
            block[*place..place + 2].copy_from_slice(&f32_to_f16(value).to_le_bytes());
        }
        data.extend(block);
    }
    data
}
