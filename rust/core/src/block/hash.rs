//! From a block's tokens to a place in the prefix index.

use std::hash::{BuildHasher, RandomState};

/// Spreads index entries over the table. Its quality decides speed alone: a hit compares what was hashed.
pub trait TokenHash {
    /// A 64-bit hash of a block's tokens and its parent's uid. The high bits are the ones used.
    fn hash(&self, parent: u64, tokens: &[u32]) -> u64;
}

/// Folded multiplication over four tokens at a time, with secrets drawn anew for each value, so that no client can
/// prepare prompts that all meet in one bucket.
///
/// The parent enters last: the tokens of the next block can be hashed while the parent is still being looked up.
#[derive(Debug, Clone)]
pub struct FoldedHash {
    seed: u64,
    low: u64,
    high: u64,
    last: u64,
}

impl Default for FoldedHash {
    fn default() -> Self {
        let random = RandomState::new();
        let secret = |name: u64| random.hash_one(name);
        // An odd factor loses no bit of the other one.
        Self {
            seed: secret(0),
            low: secret(1),
            high: secret(2),
            last: secret(3) | 1,
        }
    }
}

/// The two halves of the 128-bit product, folded into one.
#[inline]
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

impl TokenHash for FoldedHash {
    #[inline]
    fn hash(&self, parent: u64, tokens: &[u32]) -> u64 {
        let (fours, rest) = tokens.as_chunks::<4>();
        let mut state = self.seed;
        for four in fours {
            state = fold(
                pair(four[0], four[1]) ^ self.low,
                pair(four[2], four[3]) ^ self.high ^ state,
            );
        }
        for &token in rest {
            state = fold(u64::from(token) ^ self.low, self.high ^ state);
        }
        fold(state ^ parent, self.last)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_token_and_the_parent_change_the_hash() {
        let hash = FoldedHash::default();
        for length in [1, 2, 3, 4, 5, 7, 8, 16, 17] {
            let tokens: Vec<u32> = (0..length).collect();
            let mut seen = HashSet::from([hash.hash(1, &tokens), hash.hash(2, &tokens)]);
            for position in 0..tokens.len() {
                let mut other = tokens.clone();
                other[position] ^= 1 << 20;
                seen.insert(hash.hash(1, &other));
            }
            assert_eq!(seen.len(), tokens.len() + 2, "length {length}");
        }
    }

    #[test]
    fn small_inputs_spread_over_the_high_bits() {
        let hash = FoldedHash::default();
        let mut load = vec![0_u32; 1 << 10];
        for parent in 0..1 << 7 {
            for token in 0..1 << 7 {
                load[(hash.hash(parent, &[token; 16]) >> 54) as usize] += 1;
            }
        }
        // 16384 hashes in 1024 buckets: 16 each, standard deviation 4. Ten of them is beyond chance.
        assert!(
            load.iter().all(|&count| count < 56),
            "fullest bucket: {:?}",
            load.iter().max()
        );
    }

    #[test]
    fn two_values_draw_different_secrets() {
        let (one, other) = (FoldedHash::default(), FoldedHash::default());
        assert_ne!(one.hash(1, &[1, 2, 3, 4]), other.hash(1, &[1, 2, 3, 4]));
    }
}
