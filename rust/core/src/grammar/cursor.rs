//! Where one answer stands in its grammar.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;

use super::compiler::{CompiledGrammar, mask};
use super::digits::DigitRun;
use super::error::one_line;

/// One answer's place in a grammar, and the tokens that may come next.
///
/// The step's thread says which token came, which costs nothing; the work it causes is done by whoever calls
/// [`Self::finish`] first: one of the workers while the forward pass runs, or the thread that needs the
/// mask.
pub struct Cursor {
    grammar: Arc<CompiledGrammar>,
    place: Mutex<Place>,
}

struct Place {
    /// None before the second token: until then the grammar's own first mask does.
    matcher: Option<Box<Matcher>>,
    /// The token that the matcher has not been told of.
    pending: Option<u32>,
    digits: DigitRun,
    mask: Result<Arc<[u32]>, Arc<str>>,
}

impl Cursor {
    /// At the start of a grammar.
    pub fn new(grammar: Arc<CompiledGrammar>) -> Self {
        let place = Mutex::new(Place {
            matcher: None,
            pending: None,
            digits: DigitRun::default(),
            mask: Ok(grammar.first().clone()),
        });
        Self { grammar, place }
    }

    /// A token was generated: one that the mask allows.
    pub fn advance(&self, token: u32) {
        let mut place = self.place();
        // What came before it must not be lost if nobody asked for a mask in between.
        self.catch_up(&mut place);
        place.pending = Some(token);
    }

    /// Sees to it that the mask is there. Takes some ten microseconds to some milliseconds if it is not.
    pub fn finish(&self) {
        self.catch_up(&mut self.place());
    }

    /// The tokens that may come next, or why nobody knows.
    pub fn mask(&self) -> Result<Arc<[u32]>, Arc<str>> {
        let mut place = self.place();
        self.catch_up(&mut place);
        place.mask.clone()
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        // The library catches its own panics, so that a place is never left half way.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn catch_up(&self, place: &mut Place) {
        let Some(token) = place.pending.take() else {
            return;
        };
        if place.mask.is_ok() {
            let next = self.next_mask(place, token);
            place.mask = next.map_err(|message| one_line(&message).into());
        }
    }

    fn next_mask(&self, place: &mut Place, token: u32) -> Result<Arc<[u32]>, String> {
        let matcher = place
            .matcher
            .get_or_insert_with(|| Box::new(self.grammar.matcher()));
        matcher
            .consume_token(token)
            .map_err(|error| error.to_string())?;
        let vocabulary = self.grammar.vocabulary();
        let mask = mask(matcher, vocabulary)?;
        if !self.grammar.bounds_digits() {
            return Ok(mask);
        }
        place.digits.push(vocabulary.bytes(token));
        let bounded = place.digits.bound(&mask, vocabulary.digits());
        Ok(bounded.map_or(mask, Arc::from))
    }
}
