//! Token ids to text: the library's own decode is the oracle, naive code the model of the rest.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "text/bugs.rs"]
mod bugs;
#[path = "text/decode.rs"]
mod decode;
#[path = "text/hostile.rs"]
mod hostile;
#[path = "text/stops.rs"]
mod stops;
#[path = "text/streams.rs"]
mod streams;
#[path = "text/vocabularies.rs"]
mod vocabularies;
