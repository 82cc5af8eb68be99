//! A parameter's value written without quotes, as JSON.

use super::json::{is_json, push_escaped, quoted};
use super::tool_types::ParameterType;
use super::writer::{BLANK_LIMIT, UNDECIDED_LIMIT, Writer, is_blank};

/// Turns a value into JSON as it comes.
///
/// Text passes at once, escaped. Of other types the whole is needed: it stands as it is if it is
/// JSON, `True`, `False` and `None` become JSON's, and everything else is text after all. A value of
/// no known type is text as soon as it cannot be JSON. One line end at each side belongs to the
/// layout, not to the value.
pub(super) struct ParameterValue {
    kind: ParameterType,
    mode: Mode,
    begun: bool,
    /// A line end that belongs to the value if more follows.
    line_end: bool,
}

enum Mode {
    /// What came while it could be JSON.
    Undecided(String),
    /// A JSON string whose opening quote is out.
    Text,
    /// A JSON value too large to be held.
    Verbatim,
}

impl ParameterValue {
    pub(super) fn new(kind: ParameterType) -> Self {
        Self {
            kind,
            mode: Mode::Undecided(String::new()),
            begun: false,
            line_end: false,
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        match &self.mode {
            Mode::Undecided(held) => held.len(),
            Mode::Text | Mode::Verbatim => 0,
        }
    }

    /// Takes the next text.
    pub(super) fn push(&mut self, text: &str, out: &mut Writer) {
        if out.hidden {
            return;
        }
        let mut json = String::with_capacity(text.len());
        for c in text.chars() {
            let first = !std::mem::replace(&mut self.begun, true);
            if first {
                self.begin(&mut json);
            }
            if std::mem::take(&mut self.line_end) {
                self.take('\n', &mut json);
            }
            if c == '\n' {
                self.line_end = !first;
            } else {
                self.take(c, &mut json);
            }
        }
        out.arguments(&json);
    }

    /// The value is complete.
    pub(super) fn end(&mut self, out: &mut Writer) {
        let mut json = String::new();
        self.begin(&mut json);
        match std::mem::replace(&mut self.mode, Mode::Verbatim) {
            Mode::Undecided(held) => json.push_str(&convert(self.kind, &held)),
            Mode::Text => json.push('"'),
            Mode::Verbatim => {}
        }
        out.arguments_shown(&json);
    }

    /// The answer ends inside of the value: what came stays.
    pub(super) fn finish(&mut self, out: &mut Writer) {
        if let Mode::Undecided(held) = &mut self.mode {
            out.arguments(&std::mem::take(held));
        }
    }

    fn begin(&mut self, json: &mut String) {
        let undecided = matches!(&self.mode, Mode::Undecided(held) if held.is_empty());
        if self.kind == ParameterType::String && undecided {
            self.mode = Mode::Text;
            json.push('"');
        }
    }

    fn take(&mut self, c: char, json: &mut String) {
        match &mut self.mode {
            Mode::Text => push_escaped(c, json),
            Mode::Verbatim => json.push(c),
            Mode::Undecided(held) => {
                held.push(c);
                let full = held.len() >= UNDECIDED_LIMIT;
                let open = self.kind != ParameterType::Any || may_be_json(held);
                if open && !full {
                    return;
                }
                if full && held.trim_start().starts_with(['{', '[']) {
                    json.push_str(held);
                    self.mode = Mode::Verbatim;
                } else {
                    json.push('"');
                    held.chars().for_each(|c| push_escaped(c, json));
                    self.mode = Mode::Text;
                }
            }
        }
    }
}

/// Whether a text may yet become JSON, judged by how it begins; only the last character is new.
fn may_be_json(text: &str) -> bool {
    let blanks = text.len();
    let text = text.trim_start();
    if blanks - text.len() > BLANK_LIMIT {
        return false;
    }
    let is_number = |c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E');
    match text.chars().next() {
        None | Some('{' | '[' | '"') => true,
        Some('-' | '0'..='9') => text
            .chars()
            .next_back()
            .is_some_and(|c| is_number(c) || is_blank(c)),
        Some(_) => {
            let word = text.trim_end();
            ["true", "false", "null"]
                .iter()
                .any(|literal| literal.starts_with(word))
        }
    }
}

fn convert(kind: ParameterType, text: &str) -> String {
    let value = text.trim();
    let python = match value {
        "True" | "TRUE" => "true",
        "False" | "FALSE" => "false",
        "None" => "null",
        _ => value,
    };
    let chosen = if kind == ParameterType::Any {
        value
    } else {
        python
    };
    if is_json(chosen) {
        chosen.to_owned()
    } else {
        quoted(text)
    }
}
