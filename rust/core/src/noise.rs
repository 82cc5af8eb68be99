//! Counter-based noise: what a request draws depends on its seed and the position alone.
//!
//! Philox and its kin (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) make
//! the point: a keyed bijection of a counter needs no state, so batching, preemption and restarts
//! cannot change the stream. One draw per sampled token is all that is needed here, hence `splitmix64`
//! (Steele, Lea, Flood, OOPSLA 2014) started at the mixed seed and read at the position.

/// The `splitmix64` output function: a bijection of the 64-bit integers with full avalanche.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// 64 random bits for a seed and a position.
#[inline]
pub const fn bits(seed: u64, position: u64) -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let key = mix(seed.wrapping_add(GOLDEN));
    mix(key.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// A uniform number in [0, 1) for a seed and a position, with 24 bits: exact in `f32`, never 1.
#[inline]
pub fn uniform(seed: u64, position: u64) -> f32 {
    (bits(seed, position) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// The seed of choice `index` of a request with `n` choices: choice 0 keeps the request's own.
pub const fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        seed
    } else {
        bits(seed, u64::MAX - index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_independent_of_order() {
        let n = 1 << 16;
        let mut buckets = [0u32; 64];
        let mut mean = 0.0f64;
        for position in 0..n {
            let u = uniform(42, position);
            assert!((0.0..1.0).contains(&u));
            buckets[(u * 64.0) as usize] += 1;
            mean += f64::from(u);
        }
        assert!((mean / n as f64 - 0.5).abs() < 0.01);
        // 1,024 expected a bucket, standard deviation 32: six of them are a generous bound.
        assert!(
            buckets
                .iter()
                .all(|&count| (1024 - 192..1024 + 192).contains(&count))
        );
        assert!(bits(1, 2) != bits(2, 1) && bits(0, 0) != 0);
    }

    #[test]
    fn neighbouring_seeds_do_not_correlate() {
        let same = (0..10_000)
            .filter(|&p| (uniform(7, p) < 0.5) == (uniform(8, p) < 0.5))
            .count();
        assert!((4700..5300).contains(&same), "{same}");
        assert_eq!(choice_seed(9, 0), 9);
        assert!(choice_seed(9, 1) != choice_seed(9, 2));
    }
}
