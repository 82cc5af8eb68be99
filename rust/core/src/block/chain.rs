//! Where a request stands in the prefix index.

use super::BlockId;

/// Set in [`ChainKey`]'s `place` when it names a root rather than a block.
const ROOT: u32 = 1 << 31;

/// The end of a chain of indexed blocks: a root, or the last indexed block of a request.
///
/// It names a place (a block or a root) and the uid the place had. The place may be given to other content later;
/// uids are never reused, so a key that outlived its content is recognised, and is harmless: nothing is found below
/// it and nothing is registered below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainKey {
    pub(super) uid: u64,
    place: u32,
}

/// What a [`ChainKey`] names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A slot of the root table.
    Root(u32),
    /// An indexed block.
    Block(BlockId),
}

impl ChainKey {
    /// The key of a request that takes no part in prefix caching: it finds nothing and registers nothing.
    pub const DETACHED: Self = Self { uid: 0, place: 0 };

    pub(super) fn root(slot: u32, uid: u64) -> Self {
        debug_assert!(slot < ROOT, "root slot {slot} does not fit beside the flag");
        Self {
            uid,
            place: slot | ROOT,
        }
    }

    pub(super) fn block(block: BlockId, uid: u64) -> Self {
        Self { uid, place: block }
    }

    pub(super) fn place(self) -> Place {
        if self.place & ROOT == 0 {
            Place::Block(self.place)
        } else {
            Place::Root(self.place & !ROOT)
        }
    }
}
