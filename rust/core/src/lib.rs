//! The control plane of miniinfer: everything that outlives a step.
//!
//! A step is [`Engine::plan`], the caller's forward pass over [`arrays`], [`Engine::commit`]. Around it:
//!
//! * [`block`]: KV blocks, their reference counts, the prefix index.
//! * [`inbox`]: how other threads reach the engine.
//! * [`grammar`]: answers of a given form, as masks over the vocabulary.
//! * [`output`]: what carries results to the reader: ring, hub, wake.
//! * [`lane`]: what goes past the reader, straight to its socket.
//! * [`text`]: token ids to text: detokeniser, stop strings, deltas.
//! * [`parse`]: text to reasoning, content and tool calls.
//! * [`wire`]: the same with the engine in a process of its own.
//! * [`ngram`]: drafts from a sequence's own tokens.
//! * [`sim`]: an engine without a model.
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod arrays;
pub mod block;
pub mod commands;
pub mod config;
pub mod driver;
pub mod error;
pub mod event;
pub mod frontend;
pub mod grammar;
pub mod halt;
pub mod inbox;
pub mod lane;
pub mod ngram;
pub mod noise;
pub mod output;
pub mod parse;
pub mod pipeline;
pub mod prompt_logprobs;
pub mod request;
pub mod runtime;
pub mod send;
pub mod sim;
pub mod stall;
pub mod stats;
pub mod step;
pub mod text;
pub mod wire;

mod admit;
mod check;
mod commit;
mod cost;
mod draft;
mod edits;
mod engine;
#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod lane_tests;
mod lifecycle;
mod masks;
mod overlap;
mod queue;
mod schedule;
mod stack;
mod sync;
mod table;
mod text_side;
mod write;

pub use config::{EngineConfig, NgramLookup};
pub use engine::{Command, Engine};
