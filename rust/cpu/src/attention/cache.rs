//! One layer's keys and values in memory that somebody else owns.
#![expect(unsafe_code, reason = "the memory belongs to whoever made the cache")]

use super::element::ElementType;

/// How large a cache is.
#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    /// Number of blocks.
    pub blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Key-value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Type of an element.
    pub element: ElementType,
}

/// One layer's keys and values: [blocks, block size, heads, head size] each, and for 8-bit elements
/// their scales, [blocks, block size, heads].
pub struct LayerCache {
    shape: CacheShape,
    pub(crate) keys: *mut u8,
    pub(crate) values: *mut u8,
    pub(crate) key_scales: *mut f32,
    pub(crate) value_scales: *mut f32,
}

// SAFETY: it is read by all threads at once, or written by tasks of which each has slots of its own.
unsafe impl Sync for LayerCache {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for LayerCache {}

impl LayerCache {
    /// The cache at these addresses. `scales` are not looked at unless elements have 8 bits.
    ///
    /// # Safety
    ///
    /// The memory must be as large as the shape says and aligned for its elements, live as long as
    /// this, and be written by nobody else during a call.
    pub unsafe fn new(
        shape: CacheShape,
        keys: *mut u8,
        values: *mut u8,
        scales: (*mut f32, *mut f32),
    ) -> Self {
        Self {
            shape,
            keys,
            values,
            key_scales: scales.0,
            value_scales: scales.1,
        }
    }

    /// Type of an element.
    pub fn element(&self) -> ElementType {
        self.shape.element
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.shape.blocks
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Key-value heads.
    pub fn heads(&self) -> usize {
        self.shape.heads
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.shape.head_dim
    }

    /// Number of tokens that fit.
    pub fn slots(&self) -> usize {
        self.shape.blocks * self.shape.block_size
    }

    /// Where, in elements, a head of a slot begins.
    pub(crate) fn place(&self, slot: usize, head: usize) -> usize {
        (slot * self.shape.heads + head) * self.shape.head_dim
    }
}
