//! The one type the scheduler talks to.

use super::chain::{ChainKey, Place};
use super::hash::{FoldedHash, TokenHash};
use super::index::PrefixIndex;
use super::pool::BlockPool;
use super::root::{ExtraKey, RootTable};
use super::{BlockId, MAX_BLOCKS};

/// Fewer blocks are free than were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV blocks are needed, but only {free} are free")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub needed: usize,
    /// Blocks that were free.
    pub free: u32,
}

/// What the prefix index knows of a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Full blocks at the start of the prompt that are cached.
    pub blocks: usize,
    /// How many of those are free: acquiring them takes as many from [`BlockManager::num_free`].
    pub free: u32,
}

/// Counts since construction; [`BlockManager::reset`] leaves them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockCounters {
    /// Tokens given to [`BlockManager::acquire`].
    pub queries_tokens: u64,
    /// Tokens of those that were found.
    pub hit_tokens: u64,
    /// Cached blocks handed out for other content.
    pub evictions: u64,
    /// Blocks given up for an identical one.
    pub merges: u64,
}

/// Hands out KV blocks and finds those that already hold what a request needs.
///
/// A block table is a list of blocks, one reference each; the caller keeps it. Whoever releases a table drops its
/// [`ChainKey`] too. Blocks must be released as often as they were taken; releasing one too often is a bug of the caller
/// and panics.
///
/// `H` is the hash of the prefix index; all hashes give the same results.
#[derive(Debug)]
pub struct BlockManager<H: TokenHash = FoldedHash> {
    block_size: u32,
    caching: bool,
    pub(super) pool: BlockPool,
    pub(super) index: PrefixIndex<H>,
    pub(super) roots: RootTable,
    /// Free blocks that are indexed.
    pub(super) cached_free: u32,
    /// Greater than any uid given to a root or a block, and never 0.
    pub(super) next_uid: u64,
    counters: BlockCounters,
}

impl BlockManager {
    /// A manager of `num_blocks` free blocks (at most [`MAX_BLOCKS`]) of `block_size` tokens (at least 1).
    ///
    /// Without `caching` every request is [`ChainKey::DETACHED`]: nothing is registered, nothing is found.
    pub fn new(num_blocks: u32, block_size: u32, caching: bool) -> Self {
        Self::with_hash(num_blocks, block_size, caching, FoldedHash::default())
    }
}

impl<H: TokenHash> BlockManager<H> {
    /// Like [`BlockManager::new`], with a hash of the caller's choice.
    pub fn with_hash(num_blocks: u32, block_size: u32, caching: bool, hash: H) -> Self {
        assert!(block_size > 0, "block_size is 0; it must be at least 1");
        assert!(
            num_blocks <= MAX_BLOCKS,
            "num_blocks is {num_blocks}; it must be at most {MAX_BLOCKS}"
        );
        Self {
            block_size,
            caching,
            pool: BlockPool::new(num_blocks),
            index: PrefixIndex::new(if caching { num_blocks } else { 0 }, block_size, hash),
            roots: RootTable::new(1),
            cached_free: 0,
            next_uid: 2,
            counters: BlockCounters::default(),
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// All blocks, free or not.
    pub fn num_blocks(&self) -> u32 {
        self.pool.num_blocks()
    }

    /// Blocks that nobody holds, cached or not.
    pub fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    /// Blocks that nobody holds and that can still be found.
    pub fn num_cached_free(&self) -> u32 {
        self.cached_free
    }

    /// Distinct sets of extra keys that are remembered, the empty one included.
    pub fn num_roots(&self) -> usize {
        self.roots.len()
    }

    /// The counts since construction.
    pub fn counters(&self) -> BlockCounters {
        self.counters
    }

    /// Where the chain of a request with these extra keys (a set: order does not matter) begins.
    ///
    /// The request holds the root until it gives it to [`Self::release_root`], once for each call of this. A key from
    /// before a [`Self::reset`] is dead ([`Self::is_current`]); a request that starts afresh after one asks again.
    pub fn root(&mut self, extra: &[ExtraKey]) -> ChainKey {
        if !self.caching {
            return ChainKey::DETACHED;
        }
        let uid = self.fresh_uid();
        self.roots.hold(extra, uid)
    }

    /// Lets go of a root. A root that nobody holds is forgotten with the last cached block below it. Any key that is not
    /// a current root is ignored.
    pub fn release_root(&mut self, root: ChainKey) {
        if let (true, Place::Root(slot)) = (self.is_current(root), root.place()) {
            self.roots.release(slot);
        }
    }

    /// Whether something can be found or registered below this key: its root is held, or its block still cached.
    pub fn is_current(&self, key: ChainKey) -> bool {
        let uid = match key.place() {
            Place::Root(slot) => self.roots.uid(slot),
            Place::Block(block) => self.index.uid(block),
        };
        uid == key.uid && uid != 0
    }

    /// References held on a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.pool.references(block)
    }

    /// The full blocks at the start of `tokens`, at most `max_blocks`, that are cached below `root`.
    pub fn cached<'a>(
        &'a self,
        root: ChainKey,
        tokens: &'a [u32],
        max_blocks: usize,
    ) -> impl Iterator<Item = BlockId> + 'a {
        let contents = tokens
            .chunks_exact(self.block_size as usize)
            .take(max_blocks);
        contents.scan(root, |end, content| {
            let block = self.child(*end, content)?;
            *end = self.index.key(block);
            Some(block)
        })
    }

    /// How many of the full blocks of `tokens`, at most `max_blocks`, are cached below `root`. Changes nothing.
    ///
    /// At least one token must be left to compute: pass `(tokens.len() - 1) / block_size` for a prompt.
    pub fn lookup(&self, root: ChainKey, tokens: &[u32], max_blocks: usize) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        for block in self.cached(root, tokens, max_blocks) {
            found.blocks += 1;
            found.free += u32::from(self.pool.references(block) == 0);
        }
        found
    }

    /// Takes a reference on each block that [`Self::lookup`] counts and appends them to `table`. Returns the key at
    /// their end and their number.
    pub fn acquire(
        &mut self,
        root: ChainKey,
        tokens: &[u32],
        max_blocks: usize,
        table: &mut Vec<BlockId>,
    ) -> (ChainKey, usize) {
        let found: Vec<BlockId> = self.cached(root, tokens, max_blocks).collect();
        let end = self.acquire_found(root, &found, tokens.len(), table);
        (end, found.len())
    }

    /// Like [`Self::acquire`] of a prompt of `num_tokens`, whose blocks are those of [`Self::cached`]. Nothing may have been
    /// allocated since: that can evict them. Returns the key at their end.
    pub fn acquire_found(
        &mut self,
        root: ChainKey,
        found: &[BlockId],
        num_tokens: usize,
        table: &mut Vec<BlockId>,
    ) -> ChainKey {
        for &block in found {
            debug_assert!(
                self.index.contains(block),
                "block {block} was evicted since"
            );
            self.take_cached(block);
        }
        table.extend_from_slice(found);
        if self.caching {
            self.counters.queries_tokens += num_tokens as u64;
            self.counters.hit_tokens += found.len() as u64 * u64::from(self.block_size);
        }
        found.last().map_or(root, |&last| self.index.key(last))
    }

    /// Appends `count` blocks to `table`, or none: blocks without cached content first, then the least recently
    /// released, which are evicted by this.
    pub fn allocate(&mut self, count: usize, table: &mut Vec<BlockId>) -> Result<(), OutOfBlocks> {
        if count > self.num_free() as usize {
            return Err(OutOfBlocks {
                needed: count,
                free: self.num_free(),
            });
        }
        let before = table.len();
        self.pool.take_front(count as u32, table);
        for &block in &table[before..] {
            if self.index.contains(block) {
                self.forget(block);
                self.cached_free -= 1;
                self.counters.evictions += 1;
            }
        }
        Ok(())
    }

    /// Makes a full, computed block findable: `tokens` (`block_size` of them) below `parent`.
    ///
    /// Returns the key of the longer chain and the block to use from now on. When an identical block is cached already,
    /// the caller's reference moves to that one, and its own block is released. Below a key that is not current nothing
    /// is registered, and the key returned is not current either.
    pub fn register(
        &mut self,
        parent: ChainKey,
        block: BlockId,
        tokens: &[u32],
    ) -> (ChainKey, BlockId) {
        assert!(
            tokens.len() == self.block_size as usize,
            "block {block} was registered with {} tokens; a full block has {}",
            tokens.len(),
            self.block_size
        );
        assert!(
            self.pool.references(block) > 0,
            "block {block} was registered while free"
        );
        if !self.is_current(parent) {
            return (ChainKey::DETACHED, block);
        }
        let bucket = self.index.bucket(parent.uid, tokens);
        if let Some(cached) = self.index.find(bucket, parent.uid, tokens) {
            if cached != block {
                self.take_cached(cached);
                self.release_one(block);
                self.counters.merges += 1;
            }
            return (self.index.key(cached), cached);
        }
        if let Place::Root(slot) = parent.place() {
            self.roots.add_child(slot);
        }
        // A table that shares this block can have registered it below an identical parent that was evicted since.
        if self.index.contains(block) {
            self.forget(block);
        }
        let uid = self.fresh_uid();
        self.index.insert(bucket, block, uid, parent, tokens);
        (self.index.key(block), block)
    }

    /// Adds a reference to each of these blocks, which are in use: another table holds them too.
    pub fn share(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            assert!(
                self.pool.references(block) > 0,
                "block {block} was shared while free"
            );
            self.pool.take(block);
        }
    }

    /// Gives back one reference to each of these blocks, last to first.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.release_one(block);
        }
    }

    /// The content of these blocks, which the caller holds, is not to be trusted: those that nobody else holds can
    /// no longer be found.
    pub fn distrust(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            if self.pool.references(block) == 1 && self.index.contains(block) {
                self.forget(block);
            }
        }
    }

    /// Forgets all cached content, as when the weights change. Blocks in use stay with their holders but can no longer
    /// be found, and every key given out so far is dead: what was computed before never meets what is computed after.
    pub fn reset(&mut self) {
        self.index.clear();
        self.cached_free = 0;
        self.roots = RootTable::new(self.fresh_uid());
    }

    /// The block with these tokens below a key. A dead key's uid is no block's parent: its children are unreachable.
    #[inline]
    fn child(&self, parent: ChainKey, tokens: &[u32]) -> Option<BlockId> {
        self.index
            .find(self.index.bucket(parent.uid, tokens), parent.uid, tokens)
    }

    #[inline]
    fn take_cached(&mut self, block: BlockId) {
        if self.pool.take(block) {
            self.cached_free -= 1;
        }
    }

    #[inline]
    fn release_one(&mut self, block: BlockId) {
        let cached = self.index.contains(block);
        if self.pool.release(block, cached) && cached {
            self.cached_free += 1;
        }
    }

    fn forget(&mut self, block: BlockId) {
        if let Place::Root(slot) = self.index.remove(block).place() {
            self.roots.remove_child(slot);
        }
    }

    fn fresh_uid(&mut self) -> u64 {
        self.next_uid += 1;
        self.next_uid - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distrusted_blocks_are_found_only_while_others_hold_them() {
        let mut manager = BlockManager::new(4, 1, true);
        let root = manager.root(&[]);
        let (mut table, mut other) = (Vec::new(), Vec::new());
        manager.allocate(2, &mut table).expect("four are free");
        let (key, _) = manager.register(root, table[0], &[1]);
        manager.register(key, table[1], &[2]);
        manager.acquire(root, &[1], 1, &mut other);
        manager.distrust(&table);
        manager.release(&table);
        assert_eq!(manager.lookup(root, &[1, 2], 2).blocks, 1);
        assert_eq!((manager.num_free(), manager.num_cached_free()), (3, 0));
        manager.distrust(&other);
        manager.release(&other);
        assert_eq!(manager.lookup(root, &[1, 2], 2).blocks, 0);
        manager.check(std::iter::empty()).expect("sound");
    }

    #[test]
    fn a_shared_block_whose_registered_parent_was_evicted_is_registered_anew() {
        let mut manager = BlockManager::new(4, 1, true);
        let root = manager.root(&[]);
        let (mut other, mut table) = (Vec::new(), Vec::new());
        manager.allocate(1, &mut other).expect("four are free");
        manager.register(root, other[0], &[1]);
        manager.allocate(2, &mut table).expect("three are free");
        // The twin keeps its own first block, while the second is registered below the other request's.
        let twin = table.clone();
        manager.share(&twin);
        let (key, merged) = manager.register(root, table[0], &[1]);
        assert_eq!(merged, other[0]);
        table[0] = merged;
        let (orphan, _) = manager.register(key, table[1], &[2]);
        manager.release(&table);
        manager.release(&other);
        let mut rest = Vec::new();
        manager.allocate(2, &mut rest).expect("two are free");
        assert_eq!(manager.counters().evictions, 1);
        assert!(!manager.is_current(key) && manager.is_current(orphan));

        let (key, first) = manager.register(root, twin[0], &[1]);
        let (end, second) = manager.register(key, twin[1], &[2]);
        assert_eq!([first, second], twin[..]);
        assert!(manager.is_current(end) && !manager.is_current(orphan));
        assert_eq!(manager.lookup(root, &[1, 2], 2).blocks, 2);
        let tables = [twin.as_slice(), rest.as_slice()];
        manager.check(tables.into_iter()).expect("sound");
    }
}
