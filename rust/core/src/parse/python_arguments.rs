//! Python's keyword arguments as a JSON object.

use super::json::quoted;
use super::python_value::{PythonValue, Step};
use super::writer::{Writer, is_blank};

/// Longest keyword, in bytes.
pub(super) const KEYWORD_LIMIT: usize = 256;

/// Turns `a=1, b='x')` into `{"a": 1, "b": "x"}` as it comes, from behind the opening bracket.
///
/// From where the arguments cannot be understood they pass as they are, to the bracket that closes
/// the call.
pub(super) struct PythonArguments {
    /// Arguments so far.
    count: usize,
    at: At,
}

enum At {
    Key(String),
    Value(PythonValue),
    /// Not understood; so many brackets are open, and the quote of a string with its escape.
    Raw(usize, Option<(char, bool)>),
}

impl PythonArguments {
    pub(super) fn new() -> Self {
        Self {
            count: 0,
            at: At::Key(String::new()),
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        match &self.at {
            At::Key(key) => key.len(),
            At::Value(value) => value.held(),
            At::Raw(..) => 0,
        }
    }

    /// Takes the next character. True at the call's closing bracket.
    pub(super) fn step(&mut self, c: char, out: &mut Writer) -> bool {
        match &mut self.at {
            At::Key(key) => {
                if c == '=' && !key.trim().is_empty() {
                    let lead = if self.count == 0 { "{" } else { ", " };
                    out.arguments(&format!("{lead}{}: ", quoted(key.trim())));
                    self.count += 1;
                    self.at = At::Value(PythonValue::new());
                } else if c == ')' && key.trim().is_empty() {
                    return self.end(out);
                } else if !(is_blank(c) || c == '_' || c.is_alphanumeric())
                    || key.len() >= KEYWORD_LIMIT
                {
                    if self.count > 0 {
                        key.insert_str(0, ", ");
                    }
                    let key = std::mem::take(key);
                    out.arguments(&key);
                    return self.lose(0, c, out);
                } else if !(is_blank(c) && key.is_empty()) {
                    key.push(c);
                }
                false
            }
            At::Value(value) => {
                let mut json = String::new();
                let step = value.step(c, &mut json);
                if let Step::Wrong = step {
                    value.finish(&mut json);
                }
                let depth = value.depth();
                out.arguments(&json);
                match step {
                    Step::More => false,
                    Step::End if c == ',' => {
                        self.at = At::Key(String::new());
                        false
                    }
                    Step::End if c == ')' => self.end(out),
                    Step::End | Step::Wrong => self.lose(depth, c, out),
                }
            }
            At::Raw(depth, quote) => {
                match quote {
                    Some((_, escaped)) if *escaped => *escaped = false,
                    Some((_, escaped)) if c == '\\' => *escaped = true,
                    Some((open, _)) if *open == c => *quote = None,
                    Some(_) => {}
                    None => match c {
                        '\'' | '"' => *quote = Some((c, false)),
                        '(' | '[' | '{' => *depth += 1,
                        ')' if *depth == 0 => {
                            out.end_call();
                            return true;
                        }
                        ')' | ']' | '}' => *depth = depth.saturating_sub(1),
                        _ => {}
                    },
                }
                out.arguments(c.encode_utf8(&mut [0; 4]));
                false
            }
        }
    }

    /// The answer ends inside of the arguments: what came stays.
    pub(super) fn finish(&mut self, out: &mut Writer) {
        if let At::Value(value) = &mut self.at {
            let mut json = String::new();
            value.finish(&mut json);
            out.arguments(&json);
        }
    }

    fn end(&mut self, out: &mut Writer) -> bool {
        if self.count > 0 {
            out.arguments("}");
        }
        out.end_call();
        true
    }

    /// From this character on the arguments are not understood.
    fn lose(&mut self, depth: usize, c: char, out: &mut Writer) -> bool {
        self.at = At::Raw(depth, None);
        self.step(c, out)
    }
}
