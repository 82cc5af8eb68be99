//! Where a line begins.

/// Whether a text is at the start of a line, blanks aside.
pub(super) struct LineStart(bool);

impl LineStart {
    /// At the start of the text.
    pub(super) fn new() -> Self {
        Self(true)
    }

    /// Takes the next text.
    pub(super) fn push(&mut self, text: &str) {
        let line = text.rfind('\n').map(|end| &text[end + 1..]);
        self.0 = (self.0 || line.is_some()) && line.unwrap_or(text).trim().is_empty();
    }

    /// Whether what comes now begins a line.
    pub(super) fn is_here(&self) -> bool {
        self.0
    }
}
