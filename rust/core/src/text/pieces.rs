//! What each token id says, flat: one byte string for all, offsets, one flag byte a token.

use super::error::TextError;

const KNOWN: u8 = 1;
const SPECIAL: u8 = 2;
const BYTE: u8 = 4;

/// One token's contribution to a text.
pub(super) enum Piece<'a> {
    /// Bytes of text; whole UTF-8 unless the tokenizer is byte-level.
    Text(&'a [u8]),
    /// A byte token of a vocabulary with byte fallback.
    Byte(u8),
}

/// The pieces of all ids.
#[derive(Default)]
pub(super) struct Pieces {
    data: Vec<u8>,
    /// End of each id's bytes in `data`.
    ends: Vec<u32>,
    flags: Vec<u8>,
}

impl Pieces {
    pub(super) fn with_capacity(ids: usize) -> Self {
        Self {
            data: Vec::with_capacity(ids * 8),
            ends: Vec::with_capacity(ids),
            flags: Vec::with_capacity(ids),
        }
    }

    /// Adds an id that stands for nothing.
    pub(super) fn push_unknown(&mut self) {
        self.ends.push(self.data.len() as u32);
        self.flags.push(0);
    }

    /// Adds the piece of the next id.
    pub(super) fn push(&mut self, piece: &Piece, special: bool) -> Result<(), TextError> {
        let mut flags = KNOWN | if special { SPECIAL } else { 0 };
        match piece {
            Piece::Text(bytes) => self.data.extend_from_slice(bytes),
            Piece::Byte(byte) => {
                flags |= BYTE;
                self.data.push(*byte);
            }
        }
        let end = u32::try_from(self.data.len()).map_err(|_| TextError::TooMuchText {
            bytes: self.data.len(),
        })?;
        self.ends.push(end);
        self.flags.push(flags);
        Ok(())
    }

    pub(super) fn shrink(&mut self) {
        self.data.shrink_to_fit();
    }

    /// Number of ids, known or not.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the id is known and special; `None` for an unknown id.
    pub(super) fn is_special(&self, id: u32) -> Option<bool> {
        let flags = *self.flags.get(id as usize)?;
        (flags & KNOWN != 0).then_some(flags & SPECIAL != 0)
    }

    /// The bytes of an id; none for an unknown one.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.data[start as usize..end as usize]
    }

    /// The piece of an id; an empty text for an unknown one.
    pub(super) fn piece(&self, id: u32) -> Piece<'_> {
        let bytes = self.bytes(id);
        match self.flags.get(id as usize) {
            Some(flags) if flags & BYTE != 0 => Piece::Byte(bytes[0]),
            _ => Piece::Text(bytes),
        }
    }
}
