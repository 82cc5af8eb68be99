//! An end to runs of digits: JSON's numbers may be as long as one likes, and some models like them endless.

/// Digits in a row after which another way on is taken, if the grammar knows one: a double needs 17.
const MAX_RUN: usize = 24;

/// Counts the digits at the end of JSON text, those within strings left out.
#[derive(Clone, Debug, Default)]
pub(super) struct DigitRun {
    length: usize,
    in_string: bool,
    escaped: bool,
}

impl DigitRun {
    /// More of the text.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.length = if byte.is_ascii_digit() && !self.in_string {
                self.length + 1
            } else {
                0
            };
            if self.escaped {
                self.escaped = false;
            } else if byte == b'"' {
                self.in_string = !self.in_string;
            } else {
                self.escaped = self.in_string && byte == b'\\';
            }
        }
    }

    /// Takes the tokens that begin with a digit out of a mask once there were enough of them, unless no
    /// token would be left.
    pub(super) fn bound(&self, mask: &[u32], digits: &[u32]) -> Option<Vec<u32>> {
        if self.length < MAX_RUN {
            return None;
        }
        let rest: Vec<u32> = mask.iter().zip(digits).map(|(all, no)| all & !no).collect();
        rest.iter().any(|&word| word != 0).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(text: &str) -> DigitRun {
        let mut run = DigitRun::default();
        run.push(text.as_bytes());
        run
    }

    #[test]
    fn only_digits_outside_of_strings_count_however_the_text_is_cut() {
        let number = "7".repeat(MAX_RUN);
        assert_eq!(after(&number).length, MAX_RUN);
        assert_eq!(after(&format!("{number}.")).length, 0);
        assert_eq!(after(&format!("\"{number}")).length, 0);
        assert_eq!(after(&format!("\"\\\"{number}")).length, 0);
        assert_eq!(after(&format!("\"\\\\\"{number}")).length, MAX_RUN);
        let text = r#"{"a\"1": 123"#;
        for cut in 0..text.len() {
            let mut run = after(&text[..cut]);
            run.push(&text.as_bytes()[cut..]);
            assert_eq!(run.length, 3, "cut at {cut}");
        }
    }

    #[test]
    fn a_long_run_ends_unless_the_grammar_knows_no_other_way() {
        let digits = [0b0011];
        assert_eq!(after("123").bound(&[0b0111], &digits), None);
        let long = after(&"1".repeat(MAX_RUN));
        assert_eq!(long.bound(&[0b0111], &digits), Some(vec![0b0100]));
        assert_eq!(long.bound(&[0b0011], &digits), None);
    }
}
