//! Reasoning and tool calls in text: every case, cut in every way.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "parse/bugs.rs"]
mod bugs;
#[path = "parse/cases.rs"]
mod cases;
#[path = "parse/cut.rs"]
mod cut;
#[path = "parse/hostile.rs"]
mod hostile;
#[path = "parse/splits.rs"]
mod splits;
#[path = "parse/streams.rs"]
mod streams;
