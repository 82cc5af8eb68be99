//! Tags at the place where one of them is due.

/// Matches one of several tags at the current place of a text, a character at a time.
pub(super) struct Expected {
    tags: &'static [&'static str],
    held: String,
}

/// What a character was.
pub(super) enum Match {
    /// Part of a tag, or nothing before one.
    More,
    /// The end of this tag.
    Tag(&'static str),
    /// Neither; [`Expected::take`] has what was matched before it.
    Other,
}

impl Expected {
    pub(super) fn new(tags: &'static [&'static str]) -> Self {
        Self {
            tags,
            held: String::new(),
        }
    }

    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes the next character; before a tag those that `skip` knows mean nothing.
    pub(super) fn step(&mut self, c: char, skip: impl Fn(char) -> bool) -> Match {
        if self.held.is_empty() && skip(c) {
            return Match::More;
        }
        self.held.push(c);
        let held = self.held.as_str();
        match self.tags.iter().find(|tag| tag.starts_with(held)) {
            Some(tag) if tag.len() == held.len() => {
                self.held.clear();
                Match::Tag(tag)
            }
            Some(_) => Match::More,
            None => {
                self.held.pop();
                Match::Other
            }
        }
    }

    /// What was matched of a tag, to be read as something else.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
