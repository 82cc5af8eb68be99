//! Token ids to text, one stream at a time, with no state shared between streams but the read-only
//! model.
//!
//! * [`TextModel`]: what each token id says, read once from `tokenizer.json`.
//! * [`Detokenizer`]: ids in, stable text out; never half a character.
//! * [`StopMatcher`]: stop strings over the text; holds back only what may still become one.
//! * [`TextStream`]: both together with log-probabilities, ids and the end of the answer.
//! * [`Delta`]: what one push or many merged pushes gave.

mod decoder;
mod delta;
mod detokenizer;
mod error;
mod load;
mod parsed;
mod pieces;
mod steps;
mod stop;
mod stream;

pub use decoder::TextModel;
pub use delta::{Delta, Finish, FinishReason, StopCause, TokenLogprob, TopLogprob};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop::{StopMatch, StopMatcher};
pub use stream::{LogprobInput, StopToken, StreamSpec, TextStream, TokenInput, Verdict};
