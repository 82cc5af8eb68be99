//! Where the machines write: parts, with the policy for white space between them.

use super::part::Part;

/// White space at the end of a text that is held back, as a block may follow, in bytes.
///
/// Of a longer run only so much is taken away before a block.
pub(super) const BLANK_LIMIT: usize = 64;

/// Bytes of text that are held back while they may become a call; more of it is content.
pub const UNDECIDED_LIMIT: usize = 64 * 1024;

const BLANK: [char; 4] = [' ', '\t', '\n', '\r'];

/// Whether a character is white space to a format.
pub(super) fn is_blank(c: char) -> bool {
    BLANK.contains(&c)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
}

/// Collects the parts of an answer.
///
/// A piece of text is what stands between two blocks: calls, or the reasoning for content and the
/// other way round. White space between a piece and a block goes; inside of a piece, and at the two
/// ends of the answer, it stays. Pieces of the same kind are joined by one line end, so that the
/// words on both sides of a block stay apart.
///
/// While `hidden` is set the characters come from a special token: they say where blocks are and
/// never become text.
#[expect(
    clippy::struct_excessive_bools,
    reason = "none of them says anything about another"
)]
pub(super) struct Writer {
    pub(super) parts: Vec<Part>,
    pub(super) hidden: bool,
    /// There is no content but calls; see [`super::ParseSpec::calls_only`].
    pub(super) calls_only: bool,
    calls: u32,
    /// The call has arguments so far.
    argued: bool,
    kind: Kind,
    /// At the start of a piece.
    fresh: bool,
    /// White space at the end of the piece so far.
    blank: String,
    /// Whether there has been text of each kind.
    spoken: [bool; 2],
}

impl Writer {
    pub(super) fn new(calls_only: bool) -> Self {
        Self {
            parts: Vec::new(),
            hidden: false,
            calls_only,
            calls: 0,
            argued: false,
            kind: Kind::Content,
            fresh: false,
            blank: String::new(),
            spoken: [false; 2],
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        self.blank.len()
    }

    /// What is shown of a tag that has just come, should nothing come of it.
    pub(super) fn shown(&self, tag: &str) -> String {
        if self.hidden {
            String::new()
        } else {
            tag.to_owned()
        }
    }

    /// Text of the answer itself.
    pub(super) fn content(&mut self, text: &str) {
        if !self.calls_only {
            self.text(Kind::Content, text);
        }
    }

    /// Text of the reasoning.
    pub(super) fn reasoning(&mut self, text: &str) {
        self.text(Kind::Reasoning, text);
    }

    /// Content that was held back, whatever the current character is.
    pub(super) fn restore(&mut self, text: &str) {
        let hidden = std::mem::take(&mut self.hidden);
        self.content(text);
        self.hidden = hidden;
    }

    /// A block begins or ends here: the piece of text is complete.
    pub(super) fn block(&mut self) {
        self.blank.clear();
        self.fresh = true;
    }

    /// A call begins.
    pub(super) fn call(&mut self, name: String) {
        self.block();
        let index = self.calls;
        self.parts.push(Part::ToolCall { index, name });
        self.calls += 1;
        self.argued = false;
    }

    /// The answer ends before it is certain that this is a call: it is one if nothing else can be and
    /// its name is known, and otherwise the text that was held back.
    pub(super) fn cut(&mut self, name: Option<&str>, raw: &str) {
        match name {
            Some(name) if self.calls_only => self.call(name.to_owned()),
            _ => self.restore(raw),
        }
    }

    /// More arguments of the call that began last.
    pub(super) fn arguments(&mut self, text: &str) {
        if self.hidden || text.is_empty() {
            return;
        }
        self.argued = true;
        let index = self.calls - 1;
        let parts = &mut self.parts;
        match parts.last_mut() {
            Some(Part::Arguments { text: last, .. }) => last.push_str(text),
            _ => parts.push(Part::Arguments {
                index,
                text: text.to_owned(),
            }),
        }
    }

    /// Arguments that are not the current character's.
    pub(super) fn arguments_shown(&mut self, text: &str) {
        let hidden = std::mem::take(&mut self.hidden);
        self.arguments(text);
        self.hidden = hidden;
    }

    /// The call is complete; one without arguments has an empty object of them.
    pub(super) fn end_call(&mut self) {
        if !self.argued {
            self.arguments_shown("{}");
        }
    }

    /// The answer ends: what was held back is part of it.
    pub(super) fn end(&mut self) {
        let blank = std::mem::take(&mut self.blank);
        self.emit(&blank);
    }

    fn text(&mut self, kind: Kind, mut text: &str) {
        if self.hidden || text.is_empty() {
            return;
        }
        if kind != self.kind {
            self.block();
            self.kind = kind;
        }
        if self.fresh {
            text = text.trim_start_matches(BLANK);
            if text.is_empty() {
                return;
            }
            self.fresh = false;
            if self.spoken[kind as usize] {
                self.emit("\n");
            }
        }
        let body = text.trim_end_matches(BLANK);
        if !body.is_empty() {
            let mut blank = std::mem::take(&mut self.blank);
            self.emit(&blank);
            self.emit(body);
            blank.clear();
            self.blank = blank;
        }
        self.blank.push_str(&text[body.len()..]);
        if self.blank.len() > BLANK_LIMIT {
            let surplus = self.blank.len() - BLANK_LIMIT;
            let early: String = self.blank.drain(..surplus).collect();
            self.emit(&early);
        }
    }

    fn emit(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.spoken[self.kind as usize] = true;
        let part = match self.kind {
            Kind::Reasoning => Part::Reasoning(text.to_owned()),
            Kind::Content => Part::Content(text.to_owned()),
        };
        part.push(&mut self.parts);
    }
}
