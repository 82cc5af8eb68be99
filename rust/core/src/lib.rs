//! The control plane of miniinfer: everything that outlives a step.
//!
//! * [`block`]: KV blocks, their reference counts, the prefix index.
//! * [`inbox`]: messages to the engine and text threads.
//! * [`output`]: what carries results to the reader: ring, hub, wake.
//! * [`text`]: token ids to text: detokeniser, stop strings, deltas.
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod block;
pub mod inbox;
pub mod output;
mod stack;
mod sync;
pub mod text;
