//! The engine in a process of its own: what crosses between it and the processes that talk to clients.
//!
//! The bytes are `MessagePack` (<https://github.com/msgpack/msgpack/blob/master/spec.md>); carrying them is the
//! caller's business. One [`client::Client`] and one [`host::Host`] make the two ends of a connection; the ids of a
//! client's requests carry its number, so that a host serves several.

pub mod client;
pub mod command;
mod error;
pub mod host;
pub mod limits;
mod outbox;
pub mod pack;
pub mod stats;
pub mod step;
pub mod unpack;

pub use error::WireError;

use crate::request::RequestId;

/// Bits of an id below the client's number.
const ID_BITS: u32 = 48;

/// Ids that a client may use: its number is in the upper bits.
pub fn client_ids(client: u16) -> std::ops::Range<RequestId> {
    let first = u64::from(client) << ID_BITS;
    first..first + (1 << ID_BITS)
}

/// The first byte of a frame from an engine. Frames of other kinds than these two are the caller's own.
pub mod frame {
    /// What a step had to say to one client, see [`super::step`].
    pub const STEP: u8 = 0;
    /// Counters, see [`super::stats`].
    pub const STATS: u8 = 1;
}
