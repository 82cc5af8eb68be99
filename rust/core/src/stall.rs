//! How much patience there is with readers that do not read.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Patience with readers that do not read.
#[derive(Clone, Copy, Debug)]
pub struct StallPolicy {
    /// Tokens that may wait in merged deltas before the request is paused.
    pub max_backlog: usize,
    /// How long a request may stay paused before it is cancelled.
    pub stall_limit: Duration,
}

impl Default for StallPolicy {
    fn default() -> Self {
        Self {
            max_backlog: 1024,
            stall_limit: Duration::from_secs(60),
        }
    }
}

/// How often the policy had to act.
#[derive(Debug, Default)]
pub struct StallCounters {
    /// Deltas kept back to be merged, as their reader had not taken those before.
    pub merged: AtomicU64,
    /// Requests paused.
    pub paused: AtomicU64,
    /// Requests cancelled after a pause.
    pub cancelled: AtomicU64,
}
