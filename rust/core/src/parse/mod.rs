//! Text to meaning: reasoning, content and tool calls, told apart as the text comes.
//!
//! * [`Part`]: a piece of an answer that has a meaning.
//! * [`ParseSpec`]: which formats a stream is written in.

mod part;
mod spec;

pub use part::Part;
pub use spec::{ParseSpec, ReasoningFormat, ToolFormat};
