//! JSON, a character at a time: where a value ends, and what a string says.

/// Follows a JSON value that begins with `{`, `[` or `"` to its end.
///
/// It knows strings, escapes and nesting, and takes everything else for granted.
#[derive(Default)]
pub(super) struct JsonScanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonScanner {
    /// Whether the next character is part of a string.
    pub(super) fn in_string(&self) -> bool {
        self.in_string
    }

    /// Takes the next character. True if the value ends with it.
    pub(super) fn step(&mut self, c: char) -> bool {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
        } else {
            match c {
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.depth == 0 && !self.in_string
    }
}

/// Reads what a quoted string says, from behind its opening quote.
///
/// An escape that its language does not know stays as it is written; half a surrogate pair is
/// U+FFFD.
pub(super) struct StringDecoder {
    quote: char,
    python: bool,
    escape: Escape,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

#[derive(Default)]
enum Escape {
    #[default]
    None,
    Backslash,
    /// The letter behind the backslash, how many digits belong to it, those that have come.
    Hex(char, usize, String),
}

impl StringDecoder {
    /// Of a JSON string.
    pub(super) fn json() -> Self {
        Self {
            quote: '"',
            python: false,
            escape: Escape::None,
            high: None,
        }
    }

    /// Of a Python string between such quotes.
    pub(super) fn python(quote: char) -> Self {
        Self {
            quote,
            python: true,
            ..Self::json()
        }
    }

    /// Takes the next character and appends what became certain. True at the closing quote.
    pub(super) fn step(&mut self, c: char, out: &mut String) -> bool {
        match std::mem::take(&mut self.escape) {
            Escape::None if c == '\\' => self.escape = Escape::Backslash,
            Escape::None => {
                self.end_pair(out);
                if c == self.quote {
                    return true;
                }
                out.push(c);
            }
            Escape::Backslash => self.escaped(c, out),
            Escape::Hex(letter, count, mut digits) if c.is_ascii_hexdigit() => {
                digits.push(c);
                if digits.len() < count {
                    self.escape = Escape::Hex(letter, count, digits);
                } else {
                    self.unit(u32::from_str_radix(&digits, 16).unwrap_or(u32::MAX), out);
                }
            }
            unfinished @ Escape::Hex(..) => {
                self.escape = unfinished;
                self.finish(out);
                return self.step(c, out);
            }
        }
        false
    }

    /// The text ends inside of the string: appends what was held back.
    pub(super) fn finish(&mut self, out: &mut String) {
        self.end_pair(out);
        match std::mem::take(&mut self.escape) {
            Escape::None => {}
            Escape::Backslash => out.push('\\'),
            Escape::Hex(letter, _, digits) => {
                out.extend(['\\', letter]);
                out.push_str(&digits);
            }
        }
    }

    /// Takes the character behind a backslash.
    fn escaped(&mut self, c: char, out: &mut String) {
        let digits = match c {
            'u' => 4,
            'x' if self.python => 2,
            'U' if self.python => 8,
            _ => 0,
        };
        if digits > 0 {
            self.escape = Escape::Hex(c, digits, String::new());
            return;
        }
        self.end_pair(out);
        let python = if self.python { python_escape(c) } else { None };
        match python.or_else(|| simple_escape(c)) {
            Some(said) => out.push(said),
            None if self.python && c == '\n' => {}
            None => out.extend(['\\', c]),
        }
    }

    /// Takes a UTF-16 unit, or a code point.
    fn unit(&mut self, unit: u32, out: &mut String) {
        if let (Some(high), 0xDC00..=0xDFFF) = (self.high, unit) {
            self.high = None;
            let code = 0x1_0000 + ((high - 0xD800) << 10) + (unit - 0xDC00);
            out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            return;
        }
        self.end_pair(out);
        if (0xD800..0xDC00).contains(&unit) {
            self.high = Some(unit);
        } else {
            out.push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
    }

    fn end_pair(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

fn simple_escape(c: char) -> Option<char> {
    Some(match c {
        '"' | '\\' | '/' => c,
        'b' => '\u{8}',
        'f' => '\u{C}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        _ => return None,
    })
}

/// What Python knows beside JSON.
fn python_escape(c: char) -> Option<char> {
    Some(match c {
        '\'' => c,
        '0' => '\0',
        'a' => '\u{7}',
        'v' => '\u{B}',
        _ => return None,
    })
}

/// Appends a character of a JSON string, escaped where JSON asks for it.
pub(super) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => {
            let code = u32::from(c);
            let digit = |shift: u32| char::from_digit((code >> shift) & 0xF, 16).unwrap_or('0');
            out.extend(['\\', 'u', '0', '0', digit(4), digit(0)]);
        }
        c => out.push(c),
    }
}

/// A text as a JSON string, with its quotes.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    text.chars().for_each(|c| push_escaped(c, &mut out));
    out.push('"');
    out
}

/// Whether a text is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::StringDecoder;

    fn decode(text: &str) -> (String, bool) {
        let (mut decoder, mut out) = (StringDecoder::json(), String::new());
        let ended = text.chars().any(|c| decoder.step(c, &mut out));
        if !ended {
            decoder.finish(&mut out);
        }
        (out, ended)
    }

    #[test]
    fn strings_say_what_json_says() {
        for text in ["", r#"a\n\"\\\/\tb"#, r"\u00e9\uD83D\uDE00x", "日本😀"] {
            let quoted = format!("\"{text}\"");
            let expected: String = serde_json::from_str(&quoted).expect("JSON");
            assert_eq!(decode(&quoted[1..]), (expected, true));
        }
    }

    #[test]
    fn what_json_does_not_know_stays() {
        assert_eq!(decode(r"C:\users\me"), (r"C:\users\me".into(), false));
        assert_eq!(decode(r#"\u12"x"#), (r"\u12".into(), true));
        assert_eq!(
            decode(r"\uD83Dx\uDE00\"),
            ("\u{FFFD}x\u{FFFD}\\".into(), false)
        );
        assert_eq!(decode(r"\uD83D\u00"), ("\u{FFFD}\\u00".into(), false));
    }
}
