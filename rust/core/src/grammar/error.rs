//! Why a grammar cannot be used.

use thiserror::Error;

/// Longest part of a library's message that is passed on, in bytes.
const MAX_MESSAGE: usize = 300;

/// Why a grammar was refused or could not be followed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GrammarError {
    /// The text is too long to be compiled.
    #[error("the {kind} must have at most {limit} bytes, got {bytes}")]
    TooLong {
        /// What the text is.
        kind: &'static str,
        /// The limit.
        limit: usize,
        /// Its length.
        bytes: usize,
    },
    /// Brackets within brackets: more than a parser should follow.
    #[error("the {kind} must nest at most {limit} brackets deep, got {depth}")]
    TooDeep {
        /// What the text is.
        kind: &'static str,
        /// The limit.
        limit: usize,
        /// Depth at which the look was given up.
        depth: usize,
    },
    /// A list of choices without a choice.
    #[error("choice must name at least 1 text, got none")]
    NoChoice,
    /// Something is wrong with the text.
    #[error("the {kind} cannot be used: {message}")]
    Refused {
        /// What the text is.
        kind: &'static str,
        /// What is wrong.
        message: String,
    },
    /// The model's tokens do not stand for bytes, or nothing can end an answer.
    #[error("this model cannot follow a grammar: {reason}")]
    Vocabulary {
        /// Why.
        reason: String,
    },
    /// The system has no thread to spare.
    #[error("a grammar cannot be compiled now: {reason}")]
    System {
        /// What the system says.
        reason: String,
    },
}

impl GrammarError {
    /// What the library said, made fit for one line.
    pub(super) fn refused(kind: &'static str, message: &str) -> Self {
        let message = one_line(message);
        Self::Refused { kind, message }
    }
}

/// What a library's message says, without the state that follows it, which is no help to a caller.
pub(super) fn one_line(message: &str) -> String {
    let mut lines = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("no reason was given");
    let said = if first.starts_with("panic:") {
        "it is beyond what the grammar library can do".to_owned()
    } else if first.contains("NoExtension") {
        "no text can satisfy it".to_owned()
    } else if let Some(detail) = lines.find_map(|line| line.strip_prefix("error: ")) {
        // The parser of regular expressions draws a picture first.
        format!("{} {detail}", first.trim_end_matches(" regex parse error:"))
    } else {
        first.to_owned()
    };
    let mut end = said.len().min(MAX_MESSAGE);
    while !said.is_char_boundary(end) {
        end -= 1;
    }
    said[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_of_bounded_length_cut_between_characters() {
        assert_eq!(one_line("\n  at fault\n<state>\n"), "at fault");
        assert_eq!(one_line(""), "no reason was given");
        assert_eq!(
            one_line("(in regex): regex parse error:\n  (\n  ^\nerror: unclosed group"),
            "(in regex): unclosed group"
        );
        let long = one_line(&"é".repeat(400));
        assert_eq!(long, "é".repeat(MAX_MESSAGE / 2));
    }
}
