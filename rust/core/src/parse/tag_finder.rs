//! Tags, found wherever the text is cut.

/// Finds the first of several tags in a text that comes in pieces, and holds back only an end of the
/// text that begins a tag.
///
/// The first character of a tag stands nowhere else in it, and no tag begins another: so what has
/// turned out to be no tag holds no beginning of one either. Constant time a character.
pub(super) struct TagFinder {
    tags: &'static [&'static str],
    held: String,
}

impl TagFinder {
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

    /// Gives `pass` what is no tag. At a tag, returns it and the text behind it.
    pub(super) fn push<'t>(
        &mut self,
        text: &'t str,
        mut pass: impl FnMut(&str),
    ) -> Option<(&'static str, &'t str)> {
        let mut rest = text;
        loop {
            if self.held.is_empty() {
                let at = rest.find(|c| self.tags.iter().any(|tag| tag.starts_with(c)));
                let (before, from) = rest.split_at(at.unwrap_or(rest.len()));
                if !before.is_empty() {
                    pass(before);
                }
                rest = from;
            }
            let c = rest.chars().next()?;
            self.held.push(c);
            let held = self.held.as_str();
            let tag = self.tags.iter().find(|tag| tag.starts_with(held));
            match tag {
                Some(tag) => {
                    rest = &rest[c.len_utf8()..];
                    if tag.len() == held.len() {
                        self.held.clear();
                        return Some((tag, rest));
                    }
                }
                None => {
                    self.held.pop();
                    self.release(&mut pass);
                }
            }
        }
    }

    /// Gives `pass` what was held back: no tag came of it.
    pub(super) fn release(&mut self, mut pass: impl FnMut(&str)) {
        if !self.held.is_empty() {
            pass(&self.held);
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::{ReasoningFormat, ToolFormat};

    #[test]
    fn tags_hold_their_first_character_once_and_begin_no_other_tag() {
        let reasoning = ReasoningFormat::ALL.map(|(_, format)| format.markers());
        let tools = ToolFormat::ALL.map(|(_, format)| format.markers());
        let markers: Vec<&str> = reasoning
            .into_iter()
            .chain(tools)
            .flatten()
            .copied()
            .collect();
        assert!(markers.len() > 20);
        for marker in &markers {
            let first = marker.chars().next();
            assert_eq!(
                marker.chars().filter(|c| Some(*c) == first).count(),
                1,
                "{marker}"
            );
            let longer = |other: &&&str| other.len() > marker.len() && other.starts_with(marker);
            assert_eq!(markers.iter().find(longer), None, "{marker}");
        }
    }
}
