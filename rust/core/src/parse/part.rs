//! Pieces of an answer that have a meaning.

/// One piece, in the order in which the model wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text of the model's reasoning, without its tags.
    Reasoning(String),
    /// Text of the answer itself.
    Content(String),
    /// A tool call begins.
    ToolCall {
        /// Calls are numbered from 0 in order of appearance.
        index: u32,
        /// The function's name, whole.
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The call.
        index: u32,
        /// JSON text to append to what came before.
        text: String,
    },
}

impl Part {
    /// Appends a part to a list; text that continues the last part joins it.
    pub fn push(self, parts: &mut Vec<Self>) {
        match (parts.last_mut(), self) {
            (Some(Self::Reasoning(last)), Self::Reasoning(text))
            | (Some(Self::Content(last)), Self::Content(text)) => last.push_str(&text),
            (
                Some(Self::Arguments { index, text: last }),
                Self::Arguments { index: next, text },
            ) if *index == next => {
                last.push_str(&text);
            }
            (_, part) => parts.push(part),
        }
    }
}
