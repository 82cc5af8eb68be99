//! One event of a stream as bytes: a frame that never changes around a text.

/// Room for a chunk's length in hexadecimal and its line's end.
const HEAD: usize = 18;

/// What stands before and after the text in each event of a stream.
#[derive(Debug)]
pub struct EventFrame {
    /// Up to where the text's JSON string begins.
    pub before: Vec<u8>,
    /// From where it ends.
    pub after: Vec<u8>,
    /// Each event is a chunk of HTTP/1.1's chunked coding (RFC 9112, 7.1).
    pub chunked: bool,
}

impl EventFrame {
    /// The event of a text. `scratch` is overwritten, and holds the result.
    pub fn fill<'a>(&self, text: &str, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        scratch.clear();
        scratch.resize(HEAD, 0);
        scratch.extend_from_slice(&self.before);
        serde_json::to_writer(&mut *scratch, text).expect("invariant: memory takes all bytes");
        scratch.extend_from_slice(&self.after);
        if !self.chunked {
            return &scratch[HEAD..];
        }
        let head = format!("{:x}\r\n", scratch.len() - HEAD);
        scratch.extend_from_slice(b"\r\n");
        let start = HEAD - head.len();
        scratch[start..HEAD].copy_from_slice(head.as_bytes());
        &scratch[start..]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn frame(chunked: bool) -> EventFrame {
        EventFrame {
            before: b"data: {\"text\":".to_vec(),
            after: b"}\n\n".to_vec(),
            chunked,
        }
    }

    #[test]
    fn a_text_stands_in_its_frame_escaped() {
        let mut scratch = vec![7; 3];
        let text = "a\"\\\u{8}\u{c}\n\r\t\u{0}\u{1f}\u{7f}\u{2028}€😀";
        let event = frame(false).fill(text, &mut scratch);
        let expected =
            "data: {\"text\":\"a\\\"\\\\\\b\\f\\n\\r\\t\\u0000\\u001f\u{7f}\u{2028}€😀\"}\n\n";
        assert_eq!(event, expected.as_bytes());
    }

    #[test]
    fn a_chunk_says_how_long_it_is() {
        let mut scratch = Vec::new();
        for length in [0, 1, 200, 70_000] {
            let text = "x".repeat(length);
            let plain = frame(false).fill(&text, &mut scratch).to_vec();
            let chunk = frame(true).fill(&text, &mut scratch);
            let head = format!("{:x}\r\n", plain.len());
            assert_eq!(chunk, [head.as_bytes(), &plain, b"\r\n"].concat());
        }
    }
}
