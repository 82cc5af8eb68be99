//! KV blocks: who holds them, which are free, and what the free ones still remember.
//!
//! The key-value cache of the model is cut into blocks of `block_size` token positions. This module hands out block
//! numbers; the memory behind them belongs to Python.
//!
//! * `pool`: reference counts and the free list.
//! * `hash`: from a block's tokens to a place in the index.
//! * `index`: the prefix index, from (parent, tokens) to a block.
//! * `chain`: [`ChainKey`], where a request stands in the index.
//! * `root`: [`ExtraKey`], what keeps requests with equal tokens apart.
//! * `manager`: [`BlockManager`], the one type the scheduler talks to.
//! * `check`: the whole-state verification that tests call after every operation.
//!
//! # What a cached block is
//!
//! A full block can be *indexed*: found again by what it holds and by all that came before it. Each indexed block
//! bears a number that is never used twice, its uid, and is identified by the uid of its parent and by its own tokens.
//! By induction one uid stands for one prefix, so a hit needs no trust in a hash: the parent's uid and the tokens are
//! compared, and a colliding hash costs a comparison, never a wrong answer.
//!
//! A free block keeps its entry until it is handed out again. Free blocks without an entry are handed out first, then
//! the least recently released; a request's blocks are released last to first, so a chain loses its tail before its
//! head.

mod chain;
mod check;
mod hash;
mod index;
mod manager;
mod pool;
mod root;

pub use chain::ChainKey;
pub use hash::{FoldedHash, TokenHash};
pub use manager::{BlockCounters, BlockManager, OutOfBlocks, PrefixMatch};
pub use root::ExtraKey;

/// The number of a KV block, from 0 to the number of blocks less one.
pub type BlockId = u32;

/// The largest number of blocks a manager takes: a block number and a flag share 32 bits in [`ChainKey`].
pub const MAX_BLOCKS: u32 = 1 << 31;
