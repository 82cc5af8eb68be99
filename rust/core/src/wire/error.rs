//! What can be wrong with bytes from the other process.

use thiserror::Error;

use crate::error::SubmitError;

/// Bytes that are no message.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum WireError {
    /// The message ends too early.
    #[error("the message ends at byte {at} in the middle of {what}")]
    Truncated { what: &'static str, at: usize },
    /// Something else stands where a value of some type was due.
    #[error("byte {at} must begin {wanted}, got 0x{got:02x}")]
    Type {
        wanted: &'static str,
        got: u8,
        at: usize,
    },
    /// A value outside its range.
    #[error("{name} must be {limit}, got {value}")]
    Range {
        name: &'static str,
        limit: &'static str,
        value: u64,
    },
    /// A text that is not UTF-8.
    #[error("the text at byte {at} is not UTF-8")]
    Utf8 { at: usize },
    /// More than a message.
    #[error("the message ends at byte {at} of {len}")]
    Trailing { at: usize, len: usize },
    /// Frames of a kind that this side does not know.
    #[error("{name} must be one of {known}, got {value}")]
    Unknown {
        name: &'static str,
        known: &'static str,
        value: u64,
    },
    /// A request that the sender should have refused.
    #[error("a request that cannot run came through: {0}")]
    Request(#[from] SubmitError),
}
