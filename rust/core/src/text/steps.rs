//! The decoder of a tokenizer as a flat list of steps, and what the list as a whole amounts to.

use serde_json::Value;
use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;

use super::error::TextError;

/// One step of a decoder chain.
pub(super) enum Step {
    /// Replaces a literal text in each token.
    Replace { from: String, to: String },
    /// Takes up to `start` leading and `stop` trailing copies of `content` off each token.
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    /// Puts a space before each token but the first; what a tokenizer without decoder does.
    JoinWithSpaces,
    /// Turns runs of `<0xNN>` tokens into the text of their bytes.
    ByteFallback,
    /// Makes one token of all.
    Fuse,
    /// Maps the characters of GPT-2's byte alphabet to bytes and makes one lossy text of all tokens.
    ByteLevel,
    /// A step of the library that looks at a token alone.
    Alone(DecoderWrapper),
    /// A step of the library that looks at a token and whether it is the first.
    Positional(DecoderWrapper),
    /// A step of the library that looks at a token and its neighbour.
    Neighbour(DecoderWrapper),
}

/// How the pieces of a text are put together; decided once for a tokenizer.
pub(super) enum Shape {
    /// The bytes of all tokens, decoded as UTF-8 with U+FFFD for what is not: GPT-2 style.
    Bytes { local: Vec<Step> },
    /// A text for each token, runs of byte tokens apart; `after` is applied to the text of such a run.
    Text {
        local: Vec<Step>,
        byte_fallback: bool,
        after: Vec<Step>,
    },
    /// Each token's text depends on the token before it.
    Pairwise(Vec<Step>),
    /// No rule is known: only the decoded whole is right.
    Whole(Vec<Step>),
}

/// A decoder chain, understood.
pub(super) struct Plan {
    pub(super) shape: Shape,
    /// Up to this many copies of the character are taken off the start of the whole text.
    pub(super) strip: Option<(char, usize)>,
}

impl Step {
    fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Replace { .. }
                | Self::Strip { .. }
                | Self::JoinWithSpaces
                | Self::Alone(_)
                | Self::Positional(_)
        )
    }

    /// Whether the first token comes out otherwise than the same token later on.
    pub(super) fn is_positional(&self) -> bool {
        matches!(self, Self::Positional(_) | Self::JoinWithSpaces)
    }

    fn apply(&self, tokens: Vec<String>) -> tokenizers::Result<Vec<String>> {
        Ok(match self {
            Self::Replace { from, to } => map(tokens, |token| token.replace(from, to)),
            Self::Strip {
                content,
                start,
                stop,
            } => map(tokens, |token| {
                strip(&token, *content, *start, *stop).to_owned()
            }),
            Self::JoinWithSpaces => {
                let mut place = 0;
                map(tokens, |token| {
                    place += 1;
                    if place == 1 {
                        token
                    } else {
                        format!(" {token}")
                    }
                })
            }
            Self::Fuse => vec![tokens.concat()],
            Self::ByteFallback => {
                tokenizers::decoders::byte_fallback::ByteFallback::new().decode_chain(tokens)?
            }
            Self::ByteLevel => {
                let bytes: Vec<u8> = tokens
                    .iter()
                    .flat_map(|token| byte_level_bytes(token))
                    .collect();
                vec![String::from_utf8_lossy(&bytes).into_owned()]
            }
            // The library's steps count back from the last token.
            Self::Alone(_) | Self::Positional(_) | Self::Neighbour(_) if tokens.is_empty() => {
                tokens
            }
            Self::Alone(step) | Self::Positional(step) | Self::Neighbour(step) => {
                step.decode_chain(tokens)?
            }
        })
    }
}

fn map(tokens: Vec<String>, change: impl FnMut(String) -> String) -> Vec<String> {
    tokens.into_iter().map(change).collect()
}

fn strip(token: &str, content: char, start: usize, stop: usize) -> &str {
    let mut rest = token;
    for _ in 0..start {
        let Some(shorter) = rest.strip_prefix(content) else {
            break;
        };
        rest = shorter;
    }
    for _ in 0..stop {
        let Some(shorter) = rest.strip_suffix(content) else {
            break;
        };
        rest = shorter;
    }
    rest
}

/// Runs a chain over tokens as the tokenizers library does.
pub(super) fn run_chain(
    steps: &[Step],
    mut tokens: Vec<String>,
) -> tokenizers::Result<Vec<String>> {
    for step in steps {
        tokens = step.apply(tokens)?;
    }
    Ok(tokens)
}

/// Runs local steps over tokens that are not at the start of the text.
pub(super) fn run_chain_later(
    steps: &[Step],
    mut tokens: Vec<String>,
) -> tokenizers::Result<Vec<String>> {
    if !steps.iter().any(Step::is_positional) {
        return run_chain(steps, tokens);
    }
    tokens.insert(0, String::from("x"));
    let mut tokens = run_chain(steps, tokens)?;
    tokens.remove(0);
    Ok(tokens)
}

/// Understands the `decoder` section of a `tokenizer.json`.
pub(super) fn plan(decoder: Option<Value>) -> Result<Plan, TextError> {
    let refused = |error: serde_json::Error| TextError::Part {
        part: "decoder",
        message: error.to_string(),
    };
    let mut steps = Vec::new();
    match decoder {
        None => steps.push(Step::JoinWithSpaces),
        Some(value) => {
            // Through the library's type and back: it accepts forms of old files and gives one form out.
            let decoder: DecoderWrapper = serde_json::from_value(value).map_err(refused)?;
            flatten(serde_json::to_value(decoder).map_err(refused)?, &mut steps)
                .map_err(refused)?;
        }
    }
    Ok(classify(steps))
}

fn flatten(mut value: Value, steps: &mut Vec<Step>) -> Result<(), serde_json::Error> {
    let kind = value["type"].as_str().unwrap_or_default().to_owned();
    let literal = value["pattern"]["String"]
        .as_str()
        .filter(|text| !text.is_empty());
    let step = match (kind.as_str(), literal) {
        ("Sequence", _) => {
            let Value::Array(inner) = value["decoders"].take() else {
                return Ok(());
            };
            return inner.into_iter().try_for_each(|step| flatten(step, steps));
        }
        ("Replace", Some(from)) => {
            let to = value["content"].as_str().unwrap_or_default().to_owned();
            Step::Replace {
                from: from.to_owned(),
                to,
            }
        }
        ("ByteFallback", _) => Step::ByteFallback,
        ("Fuse", _) => Step::Fuse,
        ("ByteLevel", _) => Step::ByteLevel,
        _ => match serde_json::from_value(value)? {
            DecoderWrapper::Strip(strip) => Step::Strip {
                content: strip.content,
                start: strip.start,
                stop: strip.stop,
            },
            step @ (DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_)) => {
                Step::Positional(step)
            }
            step @ (DecoderWrapper::BPE(_) | DecoderWrapper::CTC(_)) => Step::Neighbour(step),
            step => Step::Alone(step),
        },
    };
    steps.push(step);
    Ok(())
}

fn classify(mut steps: Vec<Step>) -> Plan {
    while steps.len() > 1 && matches!(steps.last(), Some(Step::Fuse)) {
        steps.pop();
    }
    let local = steps.iter().take_while(|step| step.is_local()).count();
    let byte_fallback = matches!(steps.get(local), Some(Step::ByteFallback));
    let after_from = local + usize::from(byte_fallback);
    let after = if byte_fallback {
        steps[after_from..]
            .iter()
            .take_while(|step| step.is_local())
            .count()
    } else {
        0
    };
    let strip = match &steps[after_from + after..] {
        [] => None,
        [Step::Fuse] => None,
        [Step::ByteLevel] if !byte_fallback => None,
        [
            Step::Fuse,
            Step::Strip {
                content,
                start,
                stop: 0,
            },
        ] => Some((*content, *start)),
        [
            Step::ByteLevel,
            Step::Strip {
                content,
                start,
                stop: 0,
            },
        ] if !byte_fallback => Some((*content, *start)),
        _ => {
            let pairs = matches!(steps.as_slice(), [Step::Neighbour(_)]);
            let shape = if pairs {
                Shape::Pairwise(steps)
            } else {
                Shape::Whole(steps)
            };
            return Plan { shape, strip: None };
        }
    };
    let bytes = matches!(steps.get(after_from + after), Some(Step::ByteLevel));
    steps.truncate(after_from + after);
    let after = steps.split_off(after_from);
    steps.truncate(local);
    let shape = if bytes {
        Shape::Bytes { local: steps }
    } else {
        Shape::Text {
            local: steps,
            byte_fallback,
            after,
        }
    };
    Plan { shape, strip }
}

/// The bytes that a token of GPT-2's byte alphabet stands for; a token with any other character stands for itself.
pub(super) fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(byte_level_byte)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in their order.
fn byte_level_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    let printable = |code: u32| matches!(code, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match code {
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        code if printable(code) => Some(code as u8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_the_librarys() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut seen = [false; 256];
        for code in 0..0x1_0000 {
            let Some(character) = char::from_u32(code) else {
                continue;
            };
            assert_eq!(
                byte_level_byte(character).is_some(),
                alphabet.contains(&character),
                "{code:x}"
            );
            if let Some(byte) = byte_level_byte(character) {
                assert!(!std::mem::replace(&mut seen[usize::from(byte)], true));
                let library = DecoderWrapper::ByteLevel(
                    tokenizers::pre_tokenizers::byte_level::ByteLevel::default(),
                )
                .decode_chain(vec![character.to_string()])
                .unwrap();
                assert_eq!(library, [String::from_utf8_lossy(&[byte])]);
            }
        }
        assert!(seen.iter().all(|seen| *seen));
    }

    #[test]
    fn stripping_never_counts_below_an_empty_token() {
        assert_eq!(strip("", 'x', 2, 2), "");
        assert_eq!(strip("xx", 'x', 1, 5), "");
        assert_eq!(strip(" a ", ' ', 9, 9), "a");
    }
}
