//! The prefix index: from (parent, tokens) to a block.

use std::collections::{HashMap, HashSet};

use super::BlockId;
use super::chain::{ChainKey, Place};
use super::hash::TokenHash;

/// The end of a bucket's list.
const END: u32 = u32::MAX;

/// What a block is indexed under.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Never used twice; 0 while the block is not indexed.
    uid: u64,
    parent: ChainKey,
    /// The next block of the same bucket, or [`END`].
    next: u32,
    bucket: u32,
}

const VACANT: Entry = Entry {
    uid: 0,
    parent: ChainKey::DETACHED,
    next: END,
    bucket: 0,
};

/// A hash table whose entries are the blocks themselves, chained through an array: it has room for every block from the
/// start, and colliding entries simply share a bucket.
#[derive(Debug)]
pub(super) struct PrefixIndex<H> {
    hash: H,
    block_size: usize,
    /// The first block of each bucket's list; at least as many buckets as blocks, a power of two.
    buckets: Box<[u32]>,
    /// By block number.
    entries: Box<[Entry]>,
    /// The tokens of all indexed blocks, flat: `block_size` of them by block number.
    tokens: Box<[u32]>,
}

impl<H: TokenHash> PrefixIndex<H> {
    pub(super) fn new(num_blocks: u32, block_size: u32, hash: H) -> Self {
        let (blocks, block_size) = (num_blocks as usize, block_size as usize);
        Self {
            hash,
            block_size,
            // Two at least, so that the shift in `bucket` is less than 64.
            buckets: vec![END; blocks.next_power_of_two().max(2)].into(),
            entries: vec![VACANT; blocks].into(),
            tokens: vec![0; blocks * block_size].into(),
        }
    }

    /// The bucket of a block with this parent and these tokens.
    #[inline]
    pub(super) fn bucket(&self, parent: u64, tokens: &[u32]) -> u32 {
        let shift = 64 - self.buckets.len().trailing_zeros();
        (self.hash.hash(parent, tokens) >> shift) as u32
    }

    /// The block with this parent and these tokens, if it is in this bucket.
    #[inline]
    pub(super) fn find(&self, bucket: u32, parent: u64, tokens: &[u32]) -> Option<BlockId> {
        let mut block = self.buckets[bucket as usize];
        while block != END {
            let entry = &self.entries[block as usize];
            if entry.parent.uid == parent && self.tokens(block) == tokens {
                return Some(block);
            }
            block = entry.next;
        }
        None
    }

    /// Indexes a block that is not indexed.
    pub(super) fn insert(
        &mut self,
        bucket: u32,
        block: BlockId,
        uid: u64,
        parent: ChainKey,
        tokens: &[u32],
    ) {
        debug_assert!(!self.contains(block), "block {block} is indexed already");
        let first = &mut self.buckets[bucket as usize];
        self.entries[block as usize] = Entry {
            uid,
            parent,
            next: *first,
            bucket,
        };
        *first = block;
        let start = block as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
    }

    /// Forgets an indexed block. Returns its parent.
    pub(super) fn remove(&mut self, block: BlockId) -> ChainKey {
        let Entry {
            parent,
            next,
            bucket,
            ..
        } = std::mem::replace(&mut self.entries[block as usize], VACANT);
        let first = &mut self.buckets[bucket as usize];
        if *first == block {
            *first = next;
        } else {
            let mut before = *first;
            while self.entries[before as usize].next != block {
                before = self.entries[before as usize].next;
            }
            self.entries[before as usize].next = next;
        }
        parent
    }

    /// Forgets every block.
    pub(super) fn clear(&mut self) {
        self.buckets.fill(END);
        self.entries.fill(VACANT);
    }

    #[inline]
    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.uid(block) != 0
    }

    /// The key of the chain that ends with this indexed block.
    #[inline]
    pub(super) fn key(&self, block: BlockId) -> ChainKey {
        ChainKey::block(block, self.entries[block as usize].uid)
    }

    /// The uid of a block; 0 if it is not indexed.
    #[inline]
    pub(super) fn uid(&self, block: BlockId) -> u64 {
        self.entries
            .get(block as usize)
            .map_or(0, |entry| entry.uid)
    }

    /// Verifies buckets, identities and uids (all below `next_uid`). Returns the number of blocks that hang from each
    /// root, by slot.
    pub(super) fn check(&self, next_uid: u64) -> Result<HashMap<u32, u32>, String> {
        let reached = self.check_buckets()?;
        let (mut uids, mut identities, mut children) =
            (HashSet::new(), HashSet::new(), HashMap::new());
        for block in (0..)
            .take(self.entries.len())
            .filter(|&block| self.contains(block))
        {
            let Entry { uid, parent, .. } = self.entries[block as usize];
            if !reached.contains(&block) {
                return Err(format!("index: block {block} is indexed, but in no bucket"));
            }
            if uid >= next_uid || parent.uid >= uid || !uids.insert(uid) {
                return Err(format!(
                    "index: block {block} has uid {uid} below {parent:?}; the next is {next_uid}"
                ));
            }
            if !identities.insert((parent.uid, self.tokens(block))) {
                return Err(format!("index: block {block} is indexed like another one"));
            }
            if let Place::Root(slot) = parent.place() {
                *children.entry(slot).or_default() += 1;
            }
        }
        Ok(children)
    }

    /// Walks every bucket. Returns the blocks met.
    fn check_buckets(&self) -> Result<HashSet<BlockId>, String> {
        let mut reached = HashSet::new();
        for (bucket, &first) in (0..).zip(&self.buckets) {
            let mut block = first;
            while block != END {
                let Some(entry) = self
                    .entries
                    .get(block as usize)
                    .filter(|entry| entry.uid != 0)
                else {
                    return Err(format!(
                        "index: bucket {bucket} holds block {block}, which is not indexed"
                    ));
                };
                let due = self.bucket(entry.parent.uid, self.tokens(block));
                if entry.bucket != bucket || due != bucket || !reached.insert(block) {
                    return Err(format!(
                        "index: bucket {bucket} holds block {block}, which belongs in {due} once"
                    ));
                }
                block = entry.next;
            }
        }
        Ok(reached)
    }

    #[inline]
    fn tokens(&self, block: BlockId) -> &[u32] {
        let start = block as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every entry in one bucket.
    struct Constant;

    impl TokenHash for Constant {
        fn hash(&self, _: u64, _: &[u32]) -> u64 {
            0
        }
    }

    type Damage = fn(&mut PrefixIndex<Constant>);

    fn filled() -> PrefixIndex<Constant> {
        let mut index = PrefixIndex::new(4, 2, Constant);
        let root = ChainKey::root(0, 1);
        for (block, uid, tokens) in [(0, 2, [7, 7]), (1, 3, [7, 8]), (2, 4, [8, 7])] {
            index.insert(0, block, uid, root, &tokens);
        }
        index
    }

    #[test]
    fn colliding_entries_are_told_apart_and_leave_any_place_of_their_bucket() {
        for gone in 0..3 {
            let mut index = filled();
            assert_eq!(index.remove(gone), ChainKey::root(0, 1));
            for (block, tokens) in [(0, [7, 7]), (1, [7, 8]), (2, [8, 7])] {
                assert_eq!(index.find(0, 1, &tokens), (block != gone).then_some(block));
                assert_eq!(index.find(0, 5, &tokens), None, "another parent");
            }
            assert_eq!(index.check(5).expect("sound"), HashMap::from([(0, 2)]));
        }
    }

    #[test]
    fn the_check_finds_damage() {
        let damage: [(&str, Damage); 6] = [
            ("which is not indexed", |index| index.entries[1].uid = 0),
            ("in no bucket", |index| index.buckets[0] = END),
            ("has uid 2", |index| index.entries[1].uid = 2),
            ("has uid 9", |index| index.entries[1].uid = 9),
            ("like another one", |index| index.tokens[1] = 8),
            ("which belongs in 0 once", |index| {
                index.entries[1].bucket = 1;
            }),
        ];
        for (message, damage) in damage {
            let mut index = filled();
            damage(&mut index);
            let found = index.check(5).expect_err("damaged");
            assert!(found.contains(message), "{message}: {found}");
        }
    }

    #[test]
    fn one_block_and_none_are_sizes_too() {
        let mut index = PrefixIndex::new(1, 1, super::super::FoldedHash::default());
        let bucket = index.bucket(1, &[9]);
        index.insert(bucket, 0, 2, ChainKey::root(0, 1), &[9]);
        assert_eq!(index.find(bucket, 1, &[9]), Some(0));
        let none = PrefixIndex::new(0, 16, Constant);
        assert_eq!(none.find(none.bucket(1, &[9; 16]), 1, &[9; 16]), None);
    }
}
