//! Sequences of tokens that must not be generated.

/// Token sequences of which none may come to an end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadWords(Box<[Box<[u32]>]>);

impl BadWords {
    /// The sequences, empty ones left out.
    pub fn new(sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let sequences = sequences.into_iter().filter(|ids| !ids.is_empty());
        Self(sequences.map(Vec::into_boxed_slice).collect())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sequences.
    pub fn sequences(&self) -> impl Iterator<Item = &[u32]> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// Every id in them.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flatten().copied()
    }

    /// The tokens that would complete one after this output; the same one perhaps more than once.
    pub fn banned<'a>(&'a self, output: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        self.0.iter().filter_map(|sequence| {
            let (last, before) = sequence.split_last()?;
            output.ends_with(before).then_some(*last)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_banned_where_those_before_it_have_just_come() {
        let words = BadWords::new([vec![7], vec![1, 2, 3], vec![], vec![2, 4]]);
        assert_eq!(words.len(), 3);
        let banned = |output: &[u32]| words.banned(output).collect::<Vec<_>>();
        assert_eq!(banned(&[]), [7]);
        assert_eq!(banned(&[2]), [7, 4]);
        assert_eq!(banned(&[1, 2]), [7, 3, 4]);
        assert_eq!(banned(&[1, 2, 5]), [7]);
        assert_eq!(banned(&[2, 1]), [7]);
    }
}
