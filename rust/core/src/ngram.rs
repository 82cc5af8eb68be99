//! Where the latest tokens of a sequence occurred before: an index that grows with the sequence.
//!
//! What followed then is a good guess at what follows now wherever text is quoted or edited: prompt lookup (Saxena,
//! "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", 2023).

use crate::block::{FoldedHash, TokenHash};

/// Longest n-gram that is looked up.
pub const MAX_NGRAM: u32 = 16;

/// A place of a table that holds nothing.
const EMPTY: u32 = u32::MAX;

/// Places of a table that begins.
const FIRST_PLACES: usize = 64;

/// The n-grams of one length, by the position of the last token of their latest occurrence. The n-grams themselves
/// are read from the sequence, so that equal hashes mislead nobody and an entry takes four bytes.
struct Table {
    places: Vec<u32>,
    used: usize,
    len: usize,
}

/// For each length from `min` to `max`, where each n-gram of a sequence occurred last.
///
/// A token costs a look-up for each length, amortised. Tables are at most three quarters full and at least three
/// eighths once they have grown, so that a token takes at most 11 bytes for each length.
pub struct NgramIndex {
    hash: FoldedHash,
    tables: Box<[Table]>,
    indexed: usize,
    found: Option<u32>,
}

impl NgramIndex {
    /// An empty index for n-grams of `min` to `max` tokens.
    pub fn new(min: u32, max: u32) -> Self {
        let table = |len: u32| Table {
            places: vec![EMPTY; FIRST_PLACES],
            used: 0,
            len: len as usize,
        };
        Self {
            hash: FoldedHash::default(),
            tables: (min..=max).map(table).collect(),
            indexed: 0,
            found: None,
        }
    }

    /// Takes in up to `most` of the tokens that the sequence has gained since the last call. Returns how many they
    /// were. What was taken in must not change.
    pub fn extend(&mut self, tokens: &[u32], most: usize) -> usize {
        let first = self.indexed;
        let end = tokens.len().min(first.saturating_add(most));
        for at in first..end {
            self.found = None;
            for table in &mut self.tables {
                if at + 1 < table.len {
                    break;
                }
                // The last that is found is the longest.
                if let Some(before) = table.replace(&self.hash, tokens, at) {
                    self.found = Some(before);
                }
            }
        }
        self.indexed = self.indexed.max(end);
        self.indexed - first
    }

    /// The position after the latest earlier occurrence of the longest suffix of the sequence that has one: what stands
    /// there is the guess. `None` also while the index has not taken in all `len` tokens.
    pub fn source(&self, len: usize) -> Option<usize> {
        let last = self.found.filter(|_| self.indexed == len)?;
        Some(last as usize + 1)
    }

    /// Tokens taken in.
    pub(crate) fn indexed(&self) -> usize {
        self.indexed
    }
}

impl Table {
    /// Notes that the n-gram which ends at `at` is there; returns where it ended before.
    fn replace(&mut self, hash: &FoldedHash, tokens: &[u32], at: usize) -> Option<u32> {
        let gram = &tokens[at + 1 - self.len..=at];
        let mut place = self.first_place(hash, gram);
        loop {
            let before = self.places[place];
            if before == EMPTY {
                self.places[place] = at as u32;
                self.used += 1;
                self.grow(hash, tokens);
                return None;
            }
            if tokens[before as usize + 1 - self.len..=before as usize] == *gram {
                self.places[place] = at as u32;
                return Some(before);
            }
            place = (place + 1) % self.places.len();
        }
    }

    fn first_place(&self, hash: &FoldedHash, gram: &[u32]) -> usize {
        let bits = self.places.len().trailing_zeros();
        (hash.hash(0, gram) >> (u64::BITS - bits)) as usize
    }

    /// Doubles the table once it is three quarters full.
    fn grow(&mut self, hash: &FoldedHash, tokens: &[u32]) {
        if self.used * 4 < self.places.len() * 3 {
            return;
        }
        let doubled = vec![EMPTY; 2 * self.places.len()];
        for at in std::mem::replace(&mut self.places, doubled) {
            if at == EMPTY {
                continue;
            }
            let gram = &tokens[at as usize + 1 - self.len..=at as usize];
            let mut place = self.first_place(hash, gram);
            while self.places[place] != EMPTY {
                place = (place + 1) % self.places.len();
            }
            self.places[place] = at;
        }
    }
}

/// The `count` tokens that stand at `source` of a sequence and after it. Where they reach its end they go on with
/// themselves: a repetition is taken to go on.
pub fn follow(tokens: &[u32], source: usize, count: usize) -> impl Iterator<Item = u32> {
    tokens[source..].iter().copied().cycle().take(count)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// By a search through the whole sequence.
    fn naive(tokens: &[u32], min: usize, max: usize) -> Option<usize> {
        let len = tokens.len();
        (min..=max.min(len.saturating_sub(1))).rev().find_map(|n| {
            let suffix = &tokens[len - n..];
            (0..len - n)
                .rev()
                .find(|&at| tokens[at..at + n] == *suffix)
                .map(|at| at + n)
        })
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_search_finds(
            tokens in prop::collection::vec(0..4u32, 1..300),
            min in 1..5u32,
            more in 0..5u32,
            steps in prop::collection::vec(1..9usize, 1..300),
        ) {
            let mut index = NgramIndex::new(min, min + more);
            let mut len = 0;
            for step in steps {
                len = (len + step).min(tokens.len());
                index.extend(&tokens[..len], usize::MAX);
                let expected = naive(&tokens[..len], min as usize, (min + more) as usize);
                prop_assert_eq!(index.source(len), expected);
            }
        }
    }

    #[test]
    fn an_index_that_lags_behind_guesses_nothing() {
        let tokens = [5, 6, 5, 6, 5, 6];
        let mut index = NgramIndex::new(1, 2);
        assert_eq!(index.extend(&tokens, 4), 4);
        assert_eq!((index.source(6), index.indexed()), (None, 4));
        assert_eq!(index.extend(&tokens, 4), 2);
        assert_eq!(index.source(6), Some(4));
        assert_eq!(index.extend(&tokens, 4), 0);
    }

    #[test]
    fn a_repetition_goes_on() {
        let tokens = [9, 1, 2, 1, 2];
        let drafts: Vec<u32> = follow(&tokens, 3, 5).collect();
        assert_eq!(drafts, [1, 2, 1, 2, 1]);
    }

    #[test]
    fn memory_is_bounded_by_the_tokens() {
        // No n-gram occurs twice: the most entries there can be.
        for count in [1_000u32, 10_000, 100_000] {
            let tokens: Vec<u32> = (0..count).collect();
            let mut index = NgramIndex::new(2, 4);
            index.extend(&tokens, usize::MAX);
            let bytes: usize = index
                .tables
                .iter()
                .map(|table| 4 * table.places.len())
                .sum();
            assert!(bytes <= 3 * 11 * count as usize, "{bytes} for {count}");
        }
    }

    #[test]
    fn one_token_for_ever_takes_one_entry() {
        let tokens = vec![3; 50_000];
        let mut index = NgramIndex::new(1, MAX_NGRAM);
        index.extend(&tokens, usize::MAX);
        assert!(index.tables.iter().all(|table| table.used == 1));
        assert_eq!(index.source(50_000), Some(49_999));
    }
}
