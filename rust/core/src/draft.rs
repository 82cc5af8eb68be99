//! Drafts: which tokens of the requests that decode are guessed, and how many of the guesses are worth verifying.

use crate::config::NgramLookup;
use crate::engine::{Engine, HOLE};
use crate::ngram::{NgramIndex, follow};
use crate::request::Request;

/// Tokens that one plan may take into indices: a long prompt delays nobody for long, and has its drafts some
/// steps later.
const MOST_INDEXED: usize = 16_384;

/// What a new request's guesses are trusted with.
const FIRST_CONFIDENCE: f32 = 0.5;

/// Weight of the latest guess in the confidence: a stretch of new text is forgotten after a few quoted tokens.
const LEARNING: f32 = 0.25;

/// Where the tokens after `len` were thought to stand.
#[derive(Clone, Copy)]
struct Guess {
    source: usize,
    len: usize,
}

/// Guesses for one request, and how good they were.
///
/// Guesses are made in each step, also where none are verified, and compared with what came: that costs a look-up. So
/// a request learns that guesses have become good without paying for bad ones.
pub(crate) struct Drafter {
    index: NgramIndex,
    guess: Option<Guess>,
    /// Running share of guesses that were right, among those whose predecessors were.
    confidence: f32,
}

impl Drafter {
    fn new(lookup: NgramLookup) -> Self {
        Self {
            index: NgramIndex::new(lookup.min, lookup.max),
            guess: None,
            confidence: FIRST_CONFIDENCE,
        }
    }

    /// Whether it may belong to a sequence of so many tokens.
    pub fn fits(&self, len: usize) -> bool {
        self.index.indexed() <= len && self.guess.is_none_or(|g| g.source < g.len && g.len <= len)
    }

    /// Compares the last guess with the tokens that came.
    fn learn(&mut self, tokens: &[u32]) {
        let Some(Guess { source, len }) = self.guess.take() else {
            return;
        };
        let came = &tokens[len..];
        for (guessed, &token) in follow(&tokens[..len], source, came.len()).zip(came) {
            let right = guessed == token;
            self.confidence += LEARNING * (f32::from(u8::from(right)) - self.confidence);
            if !right {
                break;
            }
        }
    }

    /// How many of up to `most` guesses are likely enough, one after the other, to be worth `price` each.
    fn worthwhile(&self, most: u32, price: f32) -> u32 {
        let reached = (1..=most).map_while(|count| {
            let likely = self.confidence.powi(count as i32) >= price;
            likely.then_some(count)
        });
        reached.last().unwrap_or(0)
    }
}

impl Request {
    /// Guesses the next tokens, and drafts those that are worth their `price`. Returns the tokens taken into its index.
    fn draft(&mut self, lookup: NgramLookup, most: u32, price: f32, indexed: usize) -> usize {
        let drafter = self
            .drafter
            .get_or_insert_with(|| Box::new(Drafter::new(lookup)));
        drafter.learn(&self.tokens);
        let taken = drafter.index.extend(&self.tokens, indexed);
        let len = self.tokens.len();
        if let Some(source) = drafter.index.source(len) {
            drafter.guess = Some(Guess { source, len });
            let count = drafter.worthwhile(most, price) as usize;
            self.drafts = follow(&self.tokens, source, count).collect();
        }
        taken
    }
}

impl Engine {
    /// Drafts the next tokens of the requests that decode, where nobody else has.
    pub(crate) fn draft(&mut self) {
        let Some(lookup) = self.config.ngram_lookup else {
            return;
        };
        let (most, price) = (self.config.max_draft_tokens, self.draft_price(lookup));
        let mut indexable = MOST_INDEXED;
        for &index in self.decoding.iter().filter(|&&index| index != HOLE) {
            let request = self.table.get_mut(index);
            if request.edits.is_none() && request.drafts.is_empty() {
                indexable -= request.draft(lookup, most, price, indexable);
            }
        }
    }

    /// How likely a guess must be to be worth its row. A row that is right saves its request's share of a later step: a
    /// row, and a part of what a step costs whatever is in it.
    fn draft_price(&self, lookup: NgramLookup) -> f32 {
        let decoding = self.num_decoding() as f32;
        decoding / (decoding + lookup.rows_per_step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOKUP: NgramLookup = NgramLookup {
        min: 1,
        max: 2,
        rows_per_step: 8.0,
    };

    /// A drafter whose guess after `tokens` is that what stands at `source` follows.
    fn guessing(tokens: &[u32], source: usize) -> Drafter {
        let guess = Guess {
            source,
            len: tokens.len(),
        };
        Drafter {
            guess: Some(guess),
            ..Drafter::new(LOOKUP)
        }
    }

    #[test]
    fn what_came_is_compared_as_far_as_the_guess_was_right() {
        let before = [1, 2, 3];
        // The guess is 2, 3, 2, 3: each right token raises the confidence, the first wrong one is the last to count.
        for (came, expected) in [
            ([2].as_slice(), 0.625),
            (&[7], 0.375),
            (&[7, 3, 2], 0.375),
            (&[2, 3], 0.718_75),
            (&[2, 9, 2], 0.468_75),
            (&[2, 3, 2], 0.789_062_5),
        ] {
            let mut drafter = guessing(&before, 1);
            let tokens = [&before, came].concat();
            drafter.learn(&tokens);
            assert!((drafter.confidence - expected).abs() < 1e-6, "{came:?}");
            let learnt = drafter.confidence;
            drafter.learn(&tokens);
            assert!((drafter.confidence - learnt).abs() < 1e-6, "learnt twice");
        }
    }

    #[test]
    fn as_many_are_verified_as_are_likely_enough() {
        for (confidence, price, expected) in [
            (1.0, 0.9, 6),
            (0.9, 0.75, 2),
            (0.5, 0.2, 2),
            (0.5, 0.6, 0),
            (0.1, 0.2, 0),
        ] {
            let drafter = Drafter {
                confidence,
                ..Drafter::new(LOOKUP)
            };
            assert_eq!(drafter.worthwhile(6, price), expected, "{confidence}");
        }
    }
}
