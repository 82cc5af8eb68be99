//! Text to meaning: reasoning, content and tool calls, told apart as the text comes.
//!
//! * [`Parser`]: text in, parts out; [`parse`] does a whole text.
//! * [`Part`]: a piece of an answer that has a meaning.
//! * [`ParseSpec`]: which formats a stream is written in.
//! * [`ToolTypes`]: the declared types of tools' parameters.
//!
//! A file for each format, each a state machine over characters, and files for what they share.

mod argument_text;
mod call_object;
mod channels;
mod deepseek_v3;
mod expected;
mod hermes;
mod json;
mod line_start;
mod llama3_json;
mod machine;
mod mistral;
mod parameter_value;
mod parser;
mod part;
mod python_arguments;
mod python_value;
mod pythonic;
mod qwen3_coder;
mod spec;
mod tag_finder;
mod think;
mod tool_types;
mod writer;

pub use parser::{Parser, parse};
pub use part::Part;
pub use spec::{ParseSpec, ReasoningFormat, ToolFormat};
pub use tool_types::{ParameterType, ToolTypes};
pub use writer::UNDECIDED_LIMIT;
