//! The delta of the tests: numbered tokens, so that a lost, doubled or reordered one shows.

use super::Delta;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tokens(pub(super) Vec<u32>);

impl Delta for Tokens {
    fn merge_from(&mut self, later: &mut Self) {
        self.0.append(&mut later.0);
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn weight(&self) -> usize {
        self.0.len()
    }
}
