//! A Python literal as JSON, a character at a time.

use super::json::{StringDecoder, is_json, push_escaped, quoted};
use super::writer::{UNDECIDED_LIMIT, is_blank};

/// Brackets that may be open at once; what is nested deeper is not understood.
const DEPTH_LIMIT: usize = 128;

/// Turns Python literals into JSON as they come.
///
/// Strings, with Python's escapes and joined where they follow each other; numbers; `True`, `False`,
/// `None` and JSON's own words; lists, tuples and dicts, with keys made strings. Whatever else stands
/// where a value belongs becomes a string of its source.
pub(super) struct PythonValue {
    /// Open brackets, as they are to be closed in Python.
    open: Vec<char>,
    /// A comma is due before the next value.
    comma: bool,
    at: At,
    /// What a string says, on its way into JSON.
    said: String,
}

enum At {
    /// A value or a closing bracket may come.
    Value,
    String(StringDecoder),
    /// After a string's closing quote; the JSON string is still open.
    StringEnd,
    Scalar(Scalar),
    /// After a bracket closed.
    End,
}

/// The source of a value that is no string and no container.
#[derive(Default)]
struct Scalar {
    text: String,
    /// Brackets opened in it.
    depth: usize,
    /// The quote of a string in it, and whether the next character is escaped.
    quote: Option<(char, bool)>,
}

/// What a character was.
pub(super) enum Step {
    /// Part of the value.
    More,
    /// The first one behind it.
    End,
    /// No part of a literal: what comes cannot be understood.
    Wrong,
}

impl Scalar {
    /// Takes a character, unless the source ends before it.
    fn step(&mut self, c: char) -> bool {
        match &mut self.quote {
            Some((_, escaped)) if *escaped => *escaped = false,
            Some((_, escaped)) if c == '\\' => *escaped = true,
            Some((quote, _)) if *quote == c => self.quote = None,
            Some(_) => {}
            None => match c {
                '\'' | '"' => self.quote = Some((c, false)),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' | ',' | ':' if self.depth == 0 => return false,
                ')' | ']' | '}' => self.depth -= 1,
                _ => {}
            },
        }
        self.text.push(c);
        true
    }

    fn json(&self, is_key: bool) -> String {
        let source = self.text.trim();
        let value = match source {
            "True" => "true".to_owned(),
            "False" => "false".to_owned(),
            "None" => "null".to_owned(),
            _ => number(source).unwrap_or_else(|| source.to_owned()),
        };
        if is_json(&value) && !is_key && !value.starts_with('"') {
            value
        } else {
            quoted(source)
        }
    }
}

/// A Python number as a JSON number.
fn number(source: &str) -> Option<String> {
    let (sign, digits) = match source.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", source.strip_prefix('+').unwrap_or(source)),
    };
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let mut digits = digits.replace('_', "");
    if digits.starts_with('.') {
        digits.insert(0, '0');
    }
    if digits.ends_with('.') {
        digits.push('0');
    }
    Some(format!("{sign}{digits}"))
}

impl PythonValue {
    pub(super) fn new() -> Self {
        Self {
            open: Vec::new(),
            comma: false,
            at: At::Value,
            said: String::new(),
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        match &self.at {
            At::Scalar(scalar) => scalar.text.len(),
            _ => 0,
        }
    }

    /// Brackets that are open.
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    /// Takes the next character and appends what became certain.
    pub(super) fn step(&mut self, c: char, json: &mut String) -> Step {
        match &mut self.at {
            At::String(decoder) => {
                let ended = decoder.step(c, &mut self.said);
                self.say(json);
                if ended {
                    self.at = At::StringEnd;
                }
                Step::More
            }
            At::Value | At::StringEnd | At::End if is_blank(c) => Step::More,
            At::StringEnd if matches!(c, '\'' | '"') => {
                self.at = At::String(StringDecoder::python(c));
                Step::More
            }
            At::StringEnd if matches!(c, ',' | ':' | ')' | ']' | '}') => {
                json.push('"');
                self.delimiter(c, json)
            }
            // Of an expression that began with a string the rest is taken for text.
            At::StringEnd => {
                push_escaped(c, json);
                Step::More
            }
            At::Scalar(scalar) => {
                if scalar.text.len() >= UNDECIDED_LIMIT {
                    return Step::Wrong;
                }
                if scalar.step(c) {
                    return Step::More;
                }
                json.push_str(&scalar.json(c == ':' && self.open.last() == Some(&'}')));
                self.delimiter(c, json)
            }
            At::Value => self.value(c, json),
            At::End => self.delimiter(c, json),
        }
    }

    /// The text ends inside of the value: what came stays.
    pub(super) fn finish(&mut self, json: &mut String) {
        match &mut self.at {
            At::String(decoder) => {
                decoder.finish(&mut self.said);
                self.say(json);
            }
            At::Scalar(scalar) => json.push_str(&std::mem::take(&mut scalar.text)),
            At::Value | At::StringEnd | At::End => {}
        }
    }

    fn say(&mut self, json: &mut String) {
        self.said.chars().for_each(|c| push_escaped(c, json));
        self.said.clear();
    }

    fn value(&mut self, c: char, json: &mut String) -> Step {
        if matches!(c, ')' | ']' | '}') {
            return self.delimiter(c, json);
        }
        if matches!(c, ',' | ':') || self.open.len() >= DEPTH_LIMIT {
            return Step::Wrong;
        }
        if std::mem::take(&mut self.comma) {
            json.push_str(", ");
        }
        match c {
            '\'' | '"' => {
                json.push('"');
                self.at = At::String(StringDecoder::python(c));
            }
            '[' | '(' => {
                json.push('[');
                self.open.push(if c == '[' { ']' } else { ')' });
            }
            '{' => {
                json.push('{');
                self.open.push('}');
            }
            _ => {
                let mut scalar = Scalar::default();
                scalar.step(c);
                self.at = At::Scalar(scalar);
            }
        }
        Step::More
    }

    /// Takes what may stand behind a value: of the outermost one, that is its end.
    fn delimiter(&mut self, c: char, json: &mut String) -> Step {
        let Some(&closing) = self.open.last() else {
            // A bracket in place of the value itself.
            let missing = matches!(self.at, At::Value);
            self.at = At::End;
            return if missing { Step::Wrong } else { Step::End };
        };
        match c {
            ',' => {
                self.comma = true;
                self.at = At::Value;
            }
            ':' if closing == '}' => {
                json.push_str(": ");
                self.at = At::Value;
            }
            _ if c == closing => {
                self.open.pop();
                self.comma = false;
                json.push(if c == '}' { '}' } else { ']' });
                self.at = At::End;
            }
            _ => return Step::Wrong,
        }
        Step::More
    }
}
