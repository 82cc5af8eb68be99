//! Whether an engine still takes requests.

use std::sync::{Mutex, PoisonError};

/// Why an engine takes no more requests, once it does not.
#[derive(Default)]
pub struct Halt(Mutex<Option<String>>);

impl Halt {
    /// The reason, if the engine has stopped.
    pub fn get(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Stops it. The first reason stands.
    pub fn set(&self, reason: &str) {
        self.lock().get_or_insert_with(|| reason.into());
    }

    /// Another engine has taken the place of the one that stopped.
    pub fn clear(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
