//! What can be wrong with a tokenizer file or a stop list.

/// Why a [`super::TextModel`] or a [`super::StopMatcher`] could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file is not JSON, or lacks what decoding needs.
    #[error("tokenizer.json: {0}")]
    Json(#[from] serde_json::Error),
    /// The decoder or the normalizer of the file is refused by the tokenizers library.
    #[error("tokenizer.json: {part}: {message}")]
    Part {
        /// `decoder` or `normalizer`.
        part: &'static str,
        /// What the library says.
        message: String,
    },
    /// An id that would make the table of tokens unreasonably large.
    #[error("tokenizer.json: token id {id} of {token:?} is above the limit of {limit}")]
    IdTooLarge {
        /// The id in the file.
        id: u32,
        /// The token that carries it.
        token: String,
        /// The largest id accepted.
        limit: u32,
    },
    /// The texts of all tokens together do not fit the 32-bit offsets of the table.
    #[error("tokenizer.json: the vocabulary holds {bytes} bytes of text, more than 4 GiB")]
    TooMuchText {
        /// Bytes of text found.
        bytes: usize,
    },
    /// A stop string of no characters would match before the first one.
    #[error("stop[{index}] is empty; a stop string needs at least one character")]
    EmptyStop {
        /// Its place in the list.
        index: usize,
    },
}
